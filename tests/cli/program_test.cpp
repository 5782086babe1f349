// The built program as a user meets it: words, messages, exit statuses, files.
#include "tests/cli/program.h"

#include "tests/cli/trace_reader.h"

namespace ballast::cli {
namespace {

TEST_F(Program, HelpShowsVerbsAndExamples) {
  const Outcome all = ballast("--help");
  EXPECT_EQ(all.status, 0);
  for (const char* part : {"train", "estimate", "config", "bench-io", "info", "data, train, save and sample",
                           "Examples:", "ballast train --config"})
    EXPECT_TRUE(contains(all.output, part)) << part << "\n" << all.output;
  const Outcome train = ballast("train --help");
  EXPECT_EQ(train.status, 0);
  for (const char* part : {"--config", "--set", "--sample", "--trace", "--trace-steps", "Ctrl-C"})
    EXPECT_TRUE(contains(train.output, part)) << part;
  EXPECT_TRUE(contains(train.output, "Usage: ballast train [OPTIONS]")) << train.output;
  for (const char* verb : {"train", "estimate", "config", "config check", "checkpoint", "checkpoint inspect",
                           "checkpoint verify", "checkpoint export", "checkpoint import", "bench-io", "info"}) {
    const std::string help = ballast(verb + std::string(" --help")).output;
    const std::string examples = help.substr(std::min(help.size(), help.find("Examples:")));
    EXPECT_TRUE(contains(examples, "  ballast " + std::string(verb))) << help;
    EXPECT_EQ(contains(examples, "ballast train"), std::string(verb) == "train") << help;
  }
  EXPECT_TRUE(contains(ballast("config check --help").output, "Usage: ballast config check [OPTIONS] [FILE]"));
  EXPECT_EQ(ballast("").status, 2);
  const Outcome version = ballast("--version");
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.output, "ballast " BALLAST_VERSION "\n");
}

TEST_F(Program, WrongWordsSuggestTheRightOnes) {
  const auto expect = [&](const std::string& words, const std::string& message) {
    const Outcome outcome = ballast(words);
    EXPECT_EQ(outcome.status, 2) << words;
    EXPECT_EQ(outcome.output, "ballast: " + message + "\n") << words;
  };
  expect("trian --config run.json", "[cli.parse] unknown verb (trian of ballast; did you mean train?)");
  expect("config chek run.json", "[cli.parse] unknown verb (chek of config; did you mean check?)");
  expect("train --confg run.json", "[cli.parse] unknown option (--confg of train; did you mean --config?)");
  expect("train --config run.json --sampel=3",
         "[cli.parse] unknown option (--sampel=3 of train; did you mean --sample?)");
  expect("train", "[cli.parse] missing option (--config FILE of train)");
  expect("train run.json", "[cli.parse] unexpected word (run.json after train; did you mean --config run.json?)");
  expect("train --config run.json --sample -3", "[cli.parse] out of range (--sample -3; want an integer >= 0)");
  expect("config check", "[cli.parse] missing word (FILE of config check)");
  expect("train --config run.json --set train.stpes=3",
         "[config.parse] unknown key (train.stpes = 3; nearest known key: train.steps)");
  expect("train --config run.json --set engine.zero_optimization.stage=4",
         "[config.parse] out of range (engine.zero_optimization.stage = 4; want an integer in [0, 3])");
}

TEST_F(Program, ChecksRunsAndEnginesConfigurations) {
  const Outcome run = ballast("config check run.json");
  EXPECT_EQ(run.status, 0);
  EXPECT_EQ(nlohmann::json::parse(run.output)["train"]["window"], nlohmann::json::parse("[1, 3]"));
  folder_.write("ds.json", R"({"zero_optimization": {"stage": 3}, "wall_clock_breakdown": true})");
  const Outcome engine = ballast("config check ds.json");
  EXPECT_EQ(engine.status, 0);
  EXPECT_EQ(nlohmann::json::parse(engine.output)["zero_optimization"]["stage"], 3);
  EXPECT_TRUE(contains(ballast("train --config ds.json").output,
                       "(wall_clock_breakdown = true; want the whole configuration under \"engine\""));
  folder_.write("bad.json", R"({"zero_optimization": {"stagee": 3}})");
  const Outcome bad = ballast("config check bad.json");
  EXPECT_EQ(bad.status, 2);
  EXPECT_TRUE(contains(bad.output, "nearest known key: zero_optimization.stage)")) << bad.output;
  const Outcome textless = ballast("config check run.json --set data.path=gone/text");
  EXPECT_EQ(textless.status, 0);
  EXPECT_TRUE(contains(textless.output, "nothing there (data.path = gone/text; ")) << textless.output;
  // What an engine would refuse that only reads as right.
  const auto refused = [&](const std::string& changes, const std::string& message) {
    const Outcome outcome = ballast("config check run.json " + changes);
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, message)) << outcome.output;
  };
  refused("--set engine.train_batch_size=5",
          "[config.batch] the batch sizes fit no number of ranks (engine.train_batch");
}

TEST_F(Program, TrainsOnOneRankAndLeavesItsFiles) {
  const Outcome outcome = ballast("train --config run.json --sample 30");
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  for (const char* part :
       {"engine: 1 rank on cpu, stage 2, optimizer states in host memory; caller-owned windows of 1 to 3 backwards",
        "text: 1 file, ", "step 2/6  loss ", "step 4/6", "step 4  held-out ", "step 6/6", "done: 6 steps, ",
        "memory of rank 0, device: peak ", "memory of rank 0, host: peak ",
        "sample of 30 bytes behind \"\\n\":", "files: runs/run/config.json"})
    EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
  EXPECT_FALSE(contains(outcome.output, "\x1b")) << "escape sequences in a pipe";
  EXPECT_EQ(std::filesystem::file_size(folder_.path() / "runs/run/sample.txt"), 30u);

  std::istringstream csv(content("runs/run/metrics.csv")), jsonl(content("runs/run/metrics.jsonl"));
  std::string line;
  std::getline(csv, line);
  EXPECT_TRUE(line.starts_with("step,tokens,epoch,seconds,loss,bits,grad_norm")) << line;
  int rows = 0;
  while (std::getline(csv, line)) ++rows;
  EXPECT_EQ(rows, 6);
  std::int64_t step = 0, tokens = 0;
  while (std::getline(jsonl, line)) {
    const auto row = nlohmann::json::parse(line);
    EXPECT_EQ(row["step"], ++step);
    EXPECT_EQ(row["applied"], 1);
    tokens += row["micro_batches"].get<std::int64_t>() * 2 * 32;
    EXPECT_EQ(row["tokens"], tokens);
    EXPECT_EQ(row.contains("held_out_bits"), step == 4 || step == 6);
  }
  EXPECT_EQ(step, 6);
  // The configuration as used starts the same run.
  const Outcome again = ballast("train --config runs/run/config.json --set train.name=again");
  EXPECT_EQ(again.status, 0) << again.output;
  const auto losses = [&](const std::string& file) {
    std::istringstream rows(content(file));
    std::vector<double> values;
    for (std::string row; std::getline(rows, row);) values.push_back(nlohmann::json::parse(row)["loss"]);
    return values;
  };
  EXPECT_EQ(losses("runs/again/metrics.jsonl"), losses("runs/run/metrics.jsonl"));
  // Another run of that name leaves nothing of this one behind.
  const Outcome replaced = ballast(
      "train --config run.json --set train.steps=1 --set engine.zero_optimization.offload_optimizer.device=nvme"
      " --set engine.zero_optimization.offload_optimizer.nvme_path=.");
  EXPECT_EQ(replaced.status, 0) << replaced.output;
  EXPECT_TRUE(contains(replaced.output, ", stage 2, optimizer states on disk (.); ")) << replaced.output;
  EXPECT_TRUE(replaced.output.ends_with("files: runs/run/config.json runs/run/metrics.csv runs/run/metrics.jsonl\n"))
      << replaced.output;
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "runs/run/sample.txt"));
}

TEST_F(Program, DataErrorsEndTheRunWithPathAndRemedy) {
  folder_.write("empty.txt", "");
  folder_.write("tiny.txt", "abc");
  folder_.write("image.bin", std::string("\x7f"
                                         "ELF\0\0",
                                         6));
  const auto error = [&](const std::string& path) {
    const Outcome outcome = ballast("train --config run.json --set data.path=" + path);
    EXPECT_EQ(outcome.status, 1) << path;
    return outcome.output;
  };
  EXPECT_EQ(error("empty.txt"), "ballast: [data.open] the file is empty (empty.txt, 0 bytes)\n");
  EXPECT_EQ(error("tiny.txt"),
            "ballast: [data.windows] too short for a window of training and one held out (tiny.txt: 3 tokens, needed "
            "65 with windows of 32; give more text, or shorter windows: in a run file model.context)\n");
  EXPECT_TRUE(contains(error("image.bin"), "not text: byte 4 is zero (image.bin, 6 bytes; "));
  EXPECT_TRUE(contains(error("absent"), "nothing there (absent: No such file or directory)"));
}

TEST_F(Program, EstimatesEveryStageAndPlacement) {
  const Outcome outcome = ballast("estimate --config run.json --ranks 4");
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  for (const char* part : {"memory of a rank of 4", "params", "grads", "optimizer", "together", "this run", "saves "})
    EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
  const Outcome measured = ballast("estimate --config run.json --measure --set engine.steps_per_print=1");
  ASSERT_EQ(measured.status, 0) << measured.output;
  EXPECT_TRUE(contains(measured.output, "measured")) << measured.output;
  EXPECT_FALSE(contains(measured.output, "ballast: step")) << measured.output;
  EXPECT_TRUE(contains(measured.output, "3            host         nvme         ")) << measured.output;
}

// Two ranks, launched by hand with torchrun's variables. Each is told to stop on its own, at another moment.
TEST_F(Program, CtrlCEndsAllRanksAfterTheSameStepWithTheReportSoFar) {
  const Outcome outcome =
      two_ranks("train --config run.json --set train.steps=1000000 --set train.eval_every=0 --sample 10",
                "until [ -s runs/run/metrics.jsonl ]; do sleep 0.1; kill -0 $zero || exit 99; done; kill -INT $one");
  EXPECT_TRUE(contains(outcome.output, "statuses 130 130")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "stopped after ")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "nothing was saved (--save DIR, ")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "files: runs/run/config.json")) << outcome.output;
  EXPECT_FALSE(contains(outcome.output, "sample of")) << outcome.output;
}

// The whole of ./dev demo behind its build, cut short.
TEST_F(Program, DemoTrainsTwoRanksAndMeasuresTheirMemory) {
  const Outcome outcome = shell(
      "BALLAST_PROGRAM=" + kProgram + " BALLAST_PYTHON=" BALLAST_PYTHON " BALLAST_RUNS=" + folder_.path().string() +
      "/runs " BALLAST_SOURCE_DIR "/tools/demo.sh --set train.steps=3 --set train.eval_windows=8 --sample 20");
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  for (const char* part :
       {"2 ranks on cpu, stage 2, optimizer states in host memory; caller-owned windows of 1 to 4", "held-out ",
        " bits a byte (order-0 entropy of the text: 4.", "sample of 20 bytes",
        "measured     measured     measured     formula      formula      formula", "this run", "memory.txt"})
    EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
  for (const char* file : {"config.json", "metrics.csv", "metrics.jsonl", "sample.txt", "memory.txt"})
    EXPECT_TRUE(std::filesystem::exists(folder_.path() / "runs/demo" / file)) << file;
}

// Two ranks as a launcher starts them; each writes its own file.
TEST_F(Program, TracesEveryLaneOfEveryRankAtStages2And3AndInBothPlacements) {
  for (const std::string stage : {"2", "3"})
    for (const std::string device : {"cpu", "nvme"}) {
      SCOPED_TRACE("stage " + stage + ", " + device);
      const std::string words =
          "train --config run.json --trace out.json --trace-steps 2:4 --set engine.steps_per_print=0"
          " --set engine.zero_optimization.stage=" +
          stage + " --set engine.zero_optimization.offload_optimizer.device=" + device +
          " --set engine.zero_optimization.offload_optimizer.nvme_path=" + folder_.path().string() +
          " --set engine.zero_optimization.stage3_param_persistence_threshold=0 --set train.window=2";
      const Outcome outcome = two_ranks(words);
      ASSERT_TRUE(contains(outcome.output, "statuses 0 0")) << outcome.output;
      EXPECT_TRUE(contains(outcome.output, " out.rank0.json")) << outcome.output;
      for (const int rank : {0, 1}) {
        const TraceReader trace(folder_.path() / ("out.rank" + std::to_string(rank) + ".json"));
        trace.expect_nested();
        EXPECT_EQ(trace.json()["traceEvents"][0]["pid"], rank);
        EXPECT_EQ(trace.json()["otherData"]["spans_left_out"], 0);
        for (const char* lane : {"steps", "caller", "compute", "gather", "reduce", "host add", "host update"})
          EXPECT_FALSE(trace.lane(lane).empty()) << lane;
        EXPECT_EQ(trace.lane("disk").empty(), device != "nvme");
        EXPECT_EQ(trace.lane("steps").size(), 3u);
        EXPECT_EQ(trace.lane("compute", "forward").size(), 6u);
        EXPECT_EQ(trace.lane("compute", "backward").size(), 6u);
        trace.expect_named("gather", "gather blocks.0");
        trace.expect_named("reduce", "reduce blocks.0");
        trace.expect_named("host update", "update blocks.0");
      }
    }
}

TEST_F(Program, TraceIsWrittenAtCtrlCAndItsWordsAreChecked) {
  const Outcome outcome =
      shell("cd " + folder_.path().string() + "; " + kProgram +
            " train --config run.json --set train.steps=1000000 --trace t.json --trace-steps "
            "2:900000 & run=$!; until [ \"$(wc -l < runs/run/metrics.jsonl 2> /dev/null || echo 0)\" -ge 3 ]; do sleep "
            "0.1; kill -0 $run || exit 99; done; kill -INT $run; wait $run; echo status $?");
  EXPECT_TRUE(contains(outcome.output, "status 130")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "runs/run/metrics.jsonl t.json")) << outcome.output;
  EXPECT_EQ(TraceReader(folder_.path() / "t.json").lane("steps").at(0).name, "step 2");

  const auto refused = [&](const std::string& words, const std::string& message) {
    const Outcome outcome = ballast("train --config run.json " + words);
    EXPECT_EQ(outcome.output, "ballast: " + message + "\n");
    EXPECT_NE(outcome.status, 0);
  };
  refused("--trace-steps 2:3", "[cli.parse] missing option (--trace FILE beside --trace-steps)");
  refused("--trace x.json --trace-steps 3",
          "[cli.parse] not a range of steps (--trace-steps 3; want FIRST:LAST, as 5:10)");
  refused("--trace x.json --trace-steps 7:9",
          "[cli.train] the run ends before the steps to trace (--trace-steps 7:9, train.steps 6)");
  refused("--trace gone/x.json", "[cli.train] can't write the trace (--trace gone/x.json: No such file or directory)");
}

TEST_F(Program, BreakdownSaysWhatTheHostDidMeanwhile) {
  const Outcome outcome = ballast("train --config run.json --set engine.wall_clock_breakdown=true");
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  for (const char* part : {"; since the first backward: backward ", ", publish ", ", the caller ",
                           "; waits for the host lane ", "; on the lane: gradients ", ", update ", ", idle "})
    EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
}

TEST_F(Program, BenchIoMeasuresADiskAndPrintsTheBestSetting) {
  for (const char* words :
       {"bench-io . --size 256M --seconds 0.002", "bench-io . --seconds 0.002 --size 256M --threads"}) {
    const Outcome outcome = ballast(words);
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    for (const char* part : {"read        ", "write       ", "256 KiB", "8.00 MiB", "depth 16", "best: ", "fio"})
      EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
    const auto start = outcome.output.find("\"aio\": ");
    ASSERT_NE(start, std::string::npos) << outcome.output;
    const std::string line = outcome.output.substr(start, outcome.output.find('\n', start) - start);
    const auto aio = nlohmann::json::parse("{" + line + "}")["aio"];
    EXPECT_GE(aio["block_size"], 256 << 10);
    EXPECT_LE(aio["queue_depth"], 16);
    folder_.write("aio.json", "{" + line + "}");
    EXPECT_EQ(ballast("config check aio.json").status, 0);
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("ballast-")) << entry.path();
  const Outcome absent = ballast("bench-io gone");
  EXPECT_EQ(absent.status, 1);
  EXPECT_TRUE(contains(absent.output, "[tiers.run_folder] nvme_path does not exist (gone, ")) << absent.output;
  EXPECT_EQ(ballast("bench-io").status, 2);
}

TEST_F(Program, InfoNamesVersions) {
  const Outcome outcome = ballast("info");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_TRUE(contains(outcome.output, "LibTorch ")) << outcome.output;
}

}  // namespace
}  // namespace ballast::cli
