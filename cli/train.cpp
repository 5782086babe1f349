#include <ATen/Parallel.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/monitor/metrics.h"
#include "ballast/monitor/progress.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/launch.h"
#include "cli/text.h"
#include "cli/trace.h"
#include "cli/trainer.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;

void write_file(const fs::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  if (!file.flush())
    throw IoError("cli.write", "can't write the file (", path.string(), ": ", std::strerror(errno),
                  "; free space there, or choose another folder: train.folder)");
}

std::shared_ptr<const data::Windows> open_windows(const RunFile& run) {
  auto corpus = std::make_shared<const data::Corpus>(
      data::Corpus::open({run.data.path, run.data.format, run.data.extensions, run.data.allow_binary}));
  return std::make_shared<const data::Windows>(
      std::move(corpus), data::WindowOptions{run.model.context, run.data.held_out, run.model.vocabulary});
}

std::string describe_saves(const SaveSection& save) {
  std::string text = save.every > 0 ? ", every " + std::to_string(save.every) + (save.every == 1 ? " step" : " steps") +
                                          " and at the end"
                                    : ", at the end";
  if (save.keep_last > 0) text += "; the last " + std::to_string(save.keep_last) + " are kept";
  return text;
}

/// All that rank 0 shows and writes. The other ranks have none.
class Console {
 public:
  /// sums: of a run that goes on.
  Console(const RunFile& run, const Trainer& trainer, const data::Windows& windows,
          const std::optional<nlohmann::json>& sums)
      : run_(run),
        unit_(run.data.format == data::TokenFormat::kByte ? "byte" : "token"),
        status_(run.train.steps, unit_, run.engine.fp16.enabled),
        folder_(run.run_folder()),
        with_times_(run.engine.wall_clock_breakdown),
        progress_(stdout, monitor::Progress::is_terminal(stdout)),
        metrics_(folder_, Status::columns(with_times_), sums ? point_of(trainer, *sums) : std::nullopt),
        entropy_(data::order0_entropy(windows.corpus())) {
    if (sums) status_.go_on(trainer.steps(), *sums);
    if (!trainer.finished()) fs::remove(folder_ / "sample.txt");  // an earlier run's; the other files are written anew
    write_file(folder_ / "config.json", run.to_json().dump(2) + "\n");
    progress_.line(describe_model(run, trainer.parameters()));
    progress_.line(describe_engine(run, trainer.engine().world()));
    progress_.line(describe_text(windows, unit_, entropy_));
    if (sums) say_what_goes_on(trainer);
    if (run.save.on())
      progress_.line("checkpoints: in " + run.save_folder().string() + describe_saves(run.save));
    else if (sums || run.save.keep_last > 0)
      progress_.line("checkpoints: none (--save DIR or --save-every N)");
  }

  nlohmann::json sums() const { return status_.sums(); }
  void say(const std::string& line) { progress_.line(line); }

  void show(const StepResult& result, const Trainer& trainer) {
    status_.add(result, trainer.epoch(), trainer.engine().memory());
    metrics_.write(status_.row(with_times_));
    const std::int64_t every = run_.engine.steps_per_print;
    const bool milestone = (every > 0 && result.step % every == 0) || result.step == run_.train.steps;
    progress_.report(status_.fraction(), status_.line(milestone), milestone);
    if (result.held_out_nats && result.step < run_.train.steps)
      progress_.line("step " + std::to_string(result.step) + "  held-out " + status_.bits(*result.held_out_nats));
  }

  void nothing_left(const Trainer& trainer) {
    progress_.line("nothing left to do: step " + std::to_string(trainer.steps()) + " was the run's last (train.steps)");
  }

  /// saved: the run's state is in the checkpoint of that step.
  void finish(const Trainer& trainer, bool saved) {
    progress_.end();
    const bool whole = status_.last().step == run_.train.steps;
    progress_.line((whole ? "done: " : "stopped after ") + status_.summary());
    if (saved)
      progress_.line("saved: " + (run_.save_folder() / trainer.tag()).string() +
                     (whole ? "" : " (--resume goes on with it)"));
    else if (!whole)
      progress_.line("nothing was saved (--save DIR, --save-every N or --resume auto has it saved)");
    if (const auto nats = status_.held_out_nats()) {
      char entropy[64];
      std::snprintf(entropy, sizeof entropy, " (order-0 entropy of the text: %.2f)", entropy_);
      progress_.line("held-out " + status_.bits(*nats) + entropy);
    }
    for (const std::string& line : describe_memory(trainer.engine().memory())) progress_.line(line);
    if (!trainer.times().empty()) progress_.line("time: " + trainer.times());
  }

  void show_sample(const std::vector<std::int64_t>& tokens) {
    std::string text;
    for (const std::int64_t token : tokens)
      text += run_.data.format == data::TokenFormat::kByte ? std::string(1, static_cast<char>(token))
                                                           : std::to_string(token) + " ";
    write_file(folder_ / "sample.txt", text);
    progress_.line("sample of " + std::to_string(tokens.size()) + " " + unit_ + "s behind " +
                   nlohmann::json(run_.sample.prompt).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
                   ":\n" + printable(text));
  }

  void show_files(const fs::path& trace) {
    std::string text = "files:";
    for (const char* name : {"config.json", "metrics.csv", "metrics.jsonl", "sample.txt"})
      if (fs::exists(folder_ / name)) text.append(" ").append((folder_ / name).string());
    if (!trace.empty()) text.append(" ").append(trace.string());
    progress_.line(text);
  }

 private:
  // The seconds of a run so far are no other run's.
  static std::optional<monitor::MetricsPoint> point_of(const Trainer& trainer, const nlohmann::json& sums) {
    return monitor::MetricsPoint{static_cast<double>(trainer.steps()), "seconds", sums.value("seconds", -1.0)};
  }

  void say_what_goes_on(const Trainer& trainer) {
    std::string text = "continues after step " + std::to_string(trainer.steps());
    if (metrics_.rows_cut() > 0)
      text += "; " + std::to_string(metrics_.rows_cut()) + " later rows of the metrics are cut off";
    if (metrics_.put_aside())
      text += "; the metrics begin here (those that were there don't lead up to it: metrics.*.old)";
    else if (metrics_.rows_kept() == 0)
      text += "; the metrics begin here";
    progress_.line(text);
  }

  const RunFile& run_;
  const std::string unit_;
  Status status_;
  const fs::path folder_;
  const bool with_times_;
  monitor::Progress progress_;
  monitor::MetricsFiles metrics_;
  const double entropy_;
};

}  // namespace

int train(RunFile run, const TraceOptions& trace_options, const std::string& resume, WeightSource* init) {
  if (run.train.threads > 0) at::set_num_threads(run.train.threads);
  // Before ranks meet: these errors are every rank's own.
  if (!resume.empty()) refuse_hugging_face(resume, "--init starts from them");
  const auto point = resume.empty() ? std::nullopt : find_resume_point(resume, run.save_folder());
  settle_saving(run, resume, point);
  const auto windows = open_windows(run);
  const Launched here = launched();
  RunTrace trace(trace_options, run.train.steps, here.rank, here.ranks);
  catch_interrupts();
  const World world = make_world(run);
  Trainer trainer(run, world, windows, init);
  std::optional<nlohmann::json> sums;
  if (!resume.empty()) sums = trainer.resume(point);
  std::unique_ptr<Console> console;
  if (world.rank() == 0) console = std::make_unique<Console>(run, trainer, *windows, sums);
  if (console && init != nullptr && !sums) console->say("weights of " + init->where());
  if (console && !resume.empty() && !sums)
    console->say("no checkpoint in " + run.save_folder().string() + " yet: starts from the beginning");

  const bool nothing_left = trainer.finished();
  bool stop = false;
  std::int64_t saved = trainer.steps();
  const auto save = [&] {
    trainer.save(console ? console->sums() : nlohmann::json::object());
    saved = trainer.steps();
  };
  // A file beside the run that can't be written ends the run as a signal does: on all ranks, and saved.
  std::exception_ptr unwritten;
  const auto write_beside = [&unwritten](const auto& write) {
    try {
      write();
    } catch (const IoError&) {
      if (!unwritten) unwritten = std::current_exception();
      ask_for_an_end();
    }
  };
  for (std::int64_t step = trainer.steps() + 1; !stop && !trainer.finished(); ++step) {
    trace.begin(step);
    const StepResult result = trainer.step();
    write_beside([&] { trace.end(step, result.stop || trainer.finished()); });
    write_beside([&] {
      if (console) console->show(result, trainer);
    });
    stop = result.stop;
    if (run.save.every > 0 && step % run.save.every == 0 && !stop) save();
  }
  if (run.save.on() && saved < trainer.steps()) save();
  trainer.settle();
  if (console && nothing_left) console->nothing_left(trainer);
  if (console && !nothing_left) console->finish(trainer, run.save.on());
  if (!stop && run.sample.count > 0) {
    const auto tokens = trainer.sample();  // every rank: at stage 3 each forward gathers parameters from all of them
    if (console) console->show_sample(tokens);
  }
  if (console) console->show_files(trace.written());
  if (unwritten) std::rethrow_exception(unwritten);  // when the others need this rank no more
  return stop ? kExitInterrupted : 0;
}

}  // namespace ballast::cli
