#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ballast/base/edit_distance.h"
#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/reworded.h"
#include "cli/bench_io.h"
#include "cli/commands.h"

namespace {

using namespace ballast;

constexpr int kExitUsage = 2;

constexpr const char* kExamples = R"(  ballast train --config examples/demo.json --set data.path=src --sample 400
  torchrun --nproc-per-node 2 --no-python ballast train --config run.json
  ballast train --config run.json --set engine.zero_optimization.stage=3 --set train.steps=100
  ballast train --config run.json --trace trace.json --trace-steps 5:8
  ballast train --config run.json --save-every 500 --keep-last 3 --resume auto
  ballast checkpoint inspect runs/run/checkpoints
  ballast checkpoint verify runs/run/checkpoints
  ballast checkpoint export runs/run/checkpoints --to model
  ballast checkpoint import model --to runs/imported
  ballast train --config run.json --init model
  ballast estimate --config run.json --ranks 8
  ballast config check run.json
  ballast bench-io /mnt/nvme --size 8G --seconds 2
  ballast info
)";
constexpr const char* kRunFile =
    "A run file has the sections engine (DeepSpeed's schema: docs/config.md), model, data, train, save and sample "
    "(docs/train.md).";

/// The library's messages name its own options; who calls this program has others.
std::string in_own_words(std::string text) {
  constexpr std::pair<const char*, const char*> kWords[] = {
      {"LoadOptions::load_optimizer = false starts it afresh",
       "--init in the place of --resume takes its weights alone"},
      {"LoadOptions::strict = false loads what fits", "the section model must be that of the checkpoint"},
      {"; LoadOptions::load_scheduler = false begins it anew", ""},
  };
  return reworded(std::move(text), kWords);
}

int fail(const std::exception& error, int status) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);  // its what() goes on with a backtrace
  const std::string text = torch != nullptr ? torch->what_without_backtrace() : error.what();
  std::fprintf(stderr, "ballast: %s\n", in_own_words(text).c_str());
  return status;
}

/// Each verb's --help ends with its own examples, and with what its footer says. words: how it is called, "train ".
void add_examples(CLI::App& app, const std::string& words = "") {
  std::istringstream lines(kExamples);
  std::string text = "Examples:\n";
  for (std::string line; std::getline(lines, line);)
    if ((line + " ").find("ballast " + words) != std::string::npos) text += line + "\n";
  const std::string more = app.get_footer();
  app.footer(text + (more.empty() ? "" : "\n" + more));
  for (CLI::App* verb : app.get_subcommands({})) add_examples(*verb, words + verb->get_name() + " ");
}

/// The first word that nobody knows, as an error that names the nearest one. Options and verbs are CLI11's.
void refuse_unknown(const CLI::App& app) {
  std::vector<std::string> verbs, options;
  for (const CLI::App* verb : app.get_subcommands({})) verbs.push_back(verb->get_name());
  for (const CLI::Option* option : app.get_options())
    if (!option->get_lnames().empty()) options.push_back("--" + option->get_lnames().front());
  const auto left = app.remaining();
  if (!left.empty()) {
    const std::string& word = left.front();
    if (word.rfind('-', 0) == 0)
      throw UseError("cli.parse", "unknown option (", word, " of ", app.get_name(), "; did you mean ",
                     nearest(word.substr(0, word.find('=')), options), "?)");
    if (verbs.empty() && app.get_option_no_throw("--config") != nullptr)
      throw UseError("cli.parse", "unexpected word (", word, " after ", app.get_name(), "; did you mean --config ",
                     word, "?)");
    if (verbs.empty()) throw UseError("cli.parse", "unexpected word (", word, " after ", app.get_name(), ")");
    throw UseError("cli.parse", "unknown verb (", word, " of ", app.get_name(), "; did you mean ", nearest(word, verbs),
                   "?)");
  }
  for (const CLI::App* verb : app.get_subcommands()) refuse_unknown(*verb);
}

struct RunOptions {
  std::string config;
  std::vector<std::string> changes;

  void add_to(CLI::App& verb) {
    verb.add_option("--config", config, "Run file (JSON)");
    verb.add_option("--set", changes, "Change a key of the run file: section.key=value; may be repeated")
        ->expected(1)
        ->take_all();
  }
  cli::RunFile load(const char* verb, const std::optional<cli::GivenModel>& given = {}) const {
    if (config.empty()) throw UseError("cli.parse", "missing option (--config FILE of ", verb, ")");
    return cli::RunFile::load(config, changes, given);
  }
};

int run(int argc, char** argv) {
  CLI::App app("Trains language models with their states sharded over ranks, on devices, in host memory or on NVMe.",
               "ballast");
  app.set_version_flag("--version", "ballast " BALLAST_VERSION);
  app.allow_extras();  // refuse_unknown() says more about them than CLI11 does
  std::function<int()> chosen;

  RunOptions options;
  long long sample = 0;
  CLI::App* train = app.add_subcommand("train", "Train a GPT on text or tokens, as a run file says");
  options.add_to(*train);
  CLI::Option* sampled = train->add_option("--sample", sample, "Tokens (bytes of text) to generate at the end");
  std::string trace_file, trace_steps;
  train->add_option("--trace", trace_file,
                    "Write what ran when, as a Chrome trace (ui.perfetto.dev); FILE.rankN of several ranks");
  train->add_option("--trace-steps", trace_steps,
                    "Steps that the trace holds, FIRST:LAST [5:10, of a shorter run its last six]");
  std::string resume, save, init;
  long long save_every = 0, keep_last = 0;
  CLI::Option* resumed =
      train
          ->add_option("--resume", resume,
                       "Go on with a checkpoint: auto, where there is one in the run's folder for them; a folder, or a "
                       "tag. A run that goes on with its own checkpoints saves beside them, at its end and when Ctrl-C "
                       "or SIGTERM comes, also without the options below")
          ->expected(0, 1)
          ->default_str("auto");
  train->add_option("--init", init,
                    "Start from these weights: a folder with config.json and safetensors files, or a checkpoint");
  train->add_option("--save", save,
                    "Folder for checkpoints; one is written at the end, and when Ctrl-C or SIGTERM comes");
  CLI::Option* every =
      train->add_option("--save-every", save_every, "Steps between checkpoints; 0: none but those of --save");
  CLI::Option* kept =
      train->add_option("--keep-last", keep_last, "Checkpoints of this run to keep, the last ones; 0: all");
  train->footer(
      "Ctrl-C ends the run after the running step, with the report so far; a second one at once. SIGTERM does the "
      "same: with checkpoints on, one is written first.");
  train->callback([&] {
    chosen = [&] {
      const auto weights = init.empty() ? nullptr : cli::open_weights(init);
      std::optional<cli::GivenModel> given;
      if (weights)
        if (const auto model = weights->model()) given = {*model, weights->where()};
      cli::RunFile file = options.load("train", given);
      if (weights) weights->check(file.model);
      if (sample < 0) throw UseError("cli.parse", "out of range (--sample ", sample, "; want an integer >= 0)");
      if (sampled->count() > 0) file.sample.count = sample;
      if (save_every < 0 || keep_last < 0)
        throw UseError("cli.parse", "out of range (", save_every < 0 ? "--save-every " : "--keep-last ",
                       save_every < 0 ? save_every : keep_last, "; want an integer >= 0)");
      if (!save.empty()) file.save.folder = save;
      if (every->count() > 0) file.save.every = save_every;
      if (kept->count() > 0) file.save.keep_last = keep_last;
      if (resumed->count() > 0 && resume.empty()) resume = "auto";
      if (kept->count() > 0 && resume.empty() && !file.save.on())
        throw UseError("cli.parse", "missing option (--save-every N, --save DIR or --resume beside --keep-last)");
      if (!trace_steps.empty() && trace_file.empty())
        throw UseError("cli.parse", "missing option (--trace FILE beside --trace-steps)");
      cli::TraceOptions trace{trace_file, {}};
      if (!trace_steps.empty()) trace.steps = cli::parse_steps(trace_steps);
      return cli::train(file, trace, resume, weights.get());
    };
  });

  int ranks = 0;
  bool with_engine = false;
  CLI::App* estimate = app.add_subcommand("estimate", "Print a rank's memory before anything is allocated");
  options.add_to(*estimate);
  estimate->add_option("--ranks", ranks, "Number of ranks; by default as many as the launcher started")
      ->check(CLI::Range(1, 1 << 20));
  estimate->add_flag("--measure", with_engine, "Also run every stage and placement for two windows, on these ranks");
  estimate->callback([&] { chosen = [&] { return cli::estimate(options.load("estimate"), ranks, with_engine); }; });

  CLI::App* config = app.add_subcommand("config", "Look at configurations");
  config->allow_extras();
  std::string file;
  std::vector<std::string> changes;
  CLI::App* check = config->add_subcommand("check", "Check a run file, or an engine's DeepSpeed configuration alone");
  check->add_option("FILE", file, "JSON file");
  check->add_option("--set", changes, "Change a key first: section.key=value")->expected(1)->take_all();
  check->callback([&] {
    chosen = [&] {
      if (file.empty()) throw UseError("cli.parse", "missing word (FILE of config check)");
      return cli::check_config(file, changes);
    };
  });

  CLI::App* checkpoint = app.add_subcommand("checkpoint", "Look at checkpoints, and convert them");
  checkpoint->allow_extras();
  std::string saved;
  bool names = false;
  const auto look_at = [&](CLI::App* verb, std::function<int()> look) {
    verb->add_option("PATH", saved, "A folder of checkpoints, for its latest, or one of them");
    verb->allow_extras();
    verb->callback([&, verb, look] {
      chosen = [&, verb, look] {
        if (saved.empty()) throw UseError("cli.parse", "missing word (PATH of checkpoint ", verb->get_name(), ")");
        return look();
      };
    });
  };
  CLI::App* inspect = checkpoint->add_subcommand("inspect", "Print what a checkpoint holds");
  inspect->add_flag("--names", names, "Each parameter too");
  look_at(inspect, [&] { return cli::inspect_checkpoint(saved, names); });
  look_at(checkpoint->add_subcommand("verify", "Read all of a checkpoint and compare its checksums"),
          [&] { return cli::verify_checkpoint(saved); });

  std::string to, foreign, dtype = "fp32";
  long long shard_bytes = cli::ExportOptions().most_shard_bytes;
  CLI::App* write =
      checkpoint->add_subcommand("export", "Write a checkpoint's weights as Hugging Face's libraries read them");
  write->add_option("PATH", saved, "A folder of checkpoints, for its latest, or one of them");
  write->add_option("--to", to, "Folder to make");
  write->add_option("--dtype", dtype, "fp32 or bf16 [fp32]")->check(CLI::IsMember({"fp32", "bf16"}));
  write->add_option("--max-shard-size", shard_bytes, "Most bytes of a file, as 2G [5G]")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::PositiveNumber);
  options.add_to(*write);
  write->footer("--config names a run file with the checkpoint's model, for one that another program has saved.");
  write->callback([&] {
    chosen = [&] {
      if (saved.empty() || to.empty())
        throw UseError("cli.parse", "missing ", saved.empty() ? "word (PATH" : "option (--to FOLDER",
                       " of checkpoint export)");
      std::optional<models::GptOptions> model;
      if (!options.config.empty()) model = options.load("checkpoint export").model;
      return cli::export_checkpoint(saved, to, {dtype == "bf16" ? c10::kBFloat16 : c10::kFloat, shard_bytes}, model);
    };
  });
  CLI::App* read =
      checkpoint->add_subcommand("import", "Make a checkpoint of what Hugging Face's libraries have written");
  read->add_option("FOLDER", foreign, "With config.json and safetensors files, of a GPT-2 or a Llama");
  read->add_option("--to", to, "Folder of checkpoints; the new one's tag is \"imported\"");
  read->callback([&] {
    chosen = [&] {
      if (foreign.empty() || to.empty())
        throw UseError("cli.parse", "missing ", foreign.empty() ? "word (FOLDER" : "option (--to FOLDER",
                       " of checkpoint import)");
      return cli::import_checkpoint(foreign, to);
    };
  });

  cli::BenchIoOptions disk;
  bool threads = false;
  CLI::App* bench_io =
      app.add_subcommand("bench-io", "Measure a disk, and print the best block aio of a configuration");
  bench_io->add_option("PATH", disk.path, "Folder on that disk; what is written there is removed at the end");
  bench_io->add_option("--size", disk.size, "Size of the file, as 4G; 256M at least [1G]")
      ->transform(CLI::AsSizeValue(false));
  bench_io->add_option("--seconds", disk.seconds, "For each of 40 figures [0.5]")->check(CLI::Range(0.001, 3600.0));
  bench_io->add_flag("--threads", threads, "Read and write with threads, as where io_uring is refused");
  bench_io->footer("Writes about as much as the disk takes in 20 figures.");
  bench_io->callback([&] {
    chosen = [&] {
      if (disk.path.empty()) throw UseError("cli.parse", "missing word (PATH of bench-io)");
      disk.uring = !threads;
      return cli::bench_io(disk);
    };
  });

  CLI::App* info = app.add_subcommand("info", "Print versions and devices");
  info->callback([&] { chosen = cli::info; });

  for (CLI::App* verb : {train, estimate, check, write, read, bench_io, info}) verb->allow_extras();
  app.footer(kRunFile);  // here, where the verbs no longer inherit it
  add_examples(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::CallForVersion& version) {
    std::printf("%s\n", version.what());
    return 0;
  } catch (const CLI::ParseError& e) {
    throw UseError("cli.parse", e.what());
  }
  refuse_unknown(app);
  if (!chosen) {
    std::fputs(app.help().c_str(), stderr);
    return kExitUsage;
  }
  return chosen();
}

}  // namespace

int main(int argc, char** argv) {
  set_log_sink([](LogLevel level, const std::string& line) { print_log_line(level, in_own_words(line)); });
  try {
    return run(argc, argv);
  } catch (const ConfigError& e) {
    return fail(e, kExitUsage);
  } catch (const UseError& e) {
    return fail(e, kExitUsage);
  } catch (const std::exception& e) {
    return fail(e, 1);
  }
}
