// Checkpoints of the built program as a user meets them: saving, going on, looking at them, and other formats.
#include <set>

#include "tests/cli/program.h"

namespace ballast::cli {
namespace {

TEST_F(Program, GoesOnFromACheckpointAsIfItHadNeverEnded) {
  const std::string train = "train --config run.json --set train.steps=9 --set model.dropout=0.2 --sample 30";
  ASSERT_EQ(ballast(train + " --set train.name=whole").status, 0);
  const std::string saving = train + " --set train.name=part --save-every 2 --keep-last 3";
  const Outcome first = ballast(saving + " --resume");
  ASSERT_EQ(first.status, 0) << first.output;
  EXPECT_TRUE(contains(first.output, "no checkpoint in runs/part/checkpoints yet")) << first.output;
  EXPECT_TRUE(contains(first.output, "checkpoints: in runs/part/checkpoints, every 2 steps and at the end; the last 3"))
      << first.output;
  EXPECT_TRUE(contains(first.output, "saved: runs/part/checkpoints/global_step9\n")) << first.output;
  EXPECT_EQ(figures(content("runs/part/metrics.jsonl")), figures(content("runs/whole/metrics.jsonl")));
  for (const char* word : {"global_step6", "runs/part/checkpoints/global_step8/"}) {
    const Outcome again = ballast(saving + " --resume " + word);
    ASSERT_EQ(again.status, 0) << again.output;
    EXPECT_TRUE(contains(again.output, "continues after step ")) << again.output;
    EXPECT_EQ(figures(content("runs/part/metrics.jsonl")), figures(content("runs/whole/metrics.jsonl"))) << word;
    EXPECT_EQ(content("runs/part/sample.txt"), content("runs/whole/sample.txt")) << word;
  }
  // Two ranks and another stage take the same run further.
  const Outcome further = ballast(
      "train --config run.json --set train.steps=10 --set model.dropout=0.2 --set engine.zero_optimization.stage=3 "
      "--set train.name=other --resume runs/part/checkpoints");
  ASSERT_EQ(further.status, 0) << further.output;
  EXPECT_TRUE(contains(further.output, "continues after step 9; the metrics begin here")) << further.output;
  EXPECT_EQ(figures(content("runs/other/metrics.jsonl")).size(), 1U);

  const Outcome unknown = ballast(saving + " --resume global_step7");
  EXPECT_EQ(unknown.status, 1);
  EXPECT_TRUE(contains(unknown.output, "there are: ")) << unknown.output;
  const Outcome nowhere = ballast(saving + " --resume nowhere/at/all");
  EXPECT_EQ(nowhere.status, 1);
  EXPECT_TRUE(contains(nowhere.output, "nowhere/at/all/latest")) << nowhere.output;
}

TEST_F(Program, SaysWhatOfTheRunFileIsNotThatOfTheCheckpoint) {
  const std::string train = "train --config run.json --set train.steps=3 --save kept ";
  ASSERT_EQ(ballast(train).status, 0);
  const auto refused = [&](const std::string& changes, const std::string& message) {
    const Outcome outcome = ballast(train + "--resume " + changes);
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, message)) << message << "\n" << outcome.output;
    EXPECT_FALSE(contains(outcome.output, "step 3/3")) << outcome.output;
  };
  refused("--set model.width=32 --set model.layers=2",
          "is of another model (kept; model.layers = 2, there 1, model.mlp_width = 128, there 64, model.width = 32, "
          "there 16; a run goes on");
  refused("--set model.norm_eps=0.001", "(kept/global_step3; model.norm_eps = 0.001, there 1e-05; ");  // shapes agree
  refused("--set engine.optimizer.type=SGD", "; --init in the place of --resume takes its weights alone)");
  refused("--set train.seed=9", "another seed (train.seed = 9, the checkpoint's 0, kept/global_step3");
  refused("--set data.held_out=0.2", "another text (");
  refused("--set train.steps=2",
          "beyond the run's last step (train.steps = 2, the checkpoint's step 3, kept/global_step3; raise train.steps");
  EXPECT_EQ(content("kept/latest"), "global_step3");

  const Outcome at_its_end = ballast(train + "--resume --set model.dropout=0.1");
  EXPECT_EQ(at_its_end.status, 0);
  EXPECT_TRUE(contains(at_its_end.output, "nothing left to do: step 3 was the run's last (train.steps)"))
      << at_its_end.output;
  EXPECT_EQ(figures(content("runs/run/metrics.jsonl")).size(), 3U);
}

TEST_F(Program, ARunThatGoesOnWithItsOwnCheckpointsSavesBesideThem) {
  const std::string train = "train --config run.json --set train.eval_every=0 ";
  const auto steps_in = [&](const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path() / folder))
      names.insert(entry.path().filename().string());
    names.erase("latest");
    return names;
  };
  // "auto" asks for a run that can go on, from its first start on.
  ASSERT_EQ(ballast(train + "--resume auto --set train.steps=2").status, 0);
  ASSERT_EQ(ballast(train + "--resume auto --set train.steps=4 --keep-last 1").status, 0);
  EXPECT_EQ(steps_in("runs/run/checkpoints"), std::set<std::string>{"global_step4"});
  // A folder of its own, named once as the one to save to and then as the one to go on from.
  ASSERT_EQ(ballast(train + "--set train.name=named --save kept --set train.steps=2").status, 0);
  const Outcome named = ballast(train + "--set train.name=named --resume kept --set train.steps=3");
  EXPECT_TRUE(contains(named.output, "checkpoints: in kept, at the end")) << named.output;
  EXPECT_EQ(steps_in("kept"), (std::set<std::string>{"global_step2", "global_step3"}));
  // Another run that starts there leaves it alone, and says that it saves nothing.
  const Outcome branch = ballast(train + "--set train.name=branch --resume kept --set train.steps=4");
  EXPECT_EQ(branch.status, 0) << branch.output;
  EXPECT_TRUE(contains(branch.output, "checkpoints: none (--save DIR or --save-every N)")) << branch.output;
  EXPECT_EQ(steps_in("kept"), (std::set<std::string>{"global_step2", "global_step3"}));
  EXPECT_EQ(ballast(train + "--set train.name=branch --resume kept --save other").status, 0);
  EXPECT_EQ(steps_in("other"), std::set<std::string>{"global_step6"});
}

TEST_F(Program, ANewRunDoesntMixWithAnotherRunsCheckpoints) {
  const std::string train = "train --config run.json --set train.steps=2 ";
  ASSERT_EQ(ballast(train + "--save-every 1").status, 0);
  const std::string metrics = content("runs/run/metrics.csv");
  for (const char* words : {"", "--save-every 1", "--save runs/run/checkpoints --set train.name=other"}) {
    const Outcome outcome = ballast(train + words);
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_EQ(outcome.output,
              "ballast: [cli.train] another run's checkpoints are there (runs/run/checkpoints, 2 of them, the last "
              "global_step2; --resume goes on with that run; else give this one another train.name or --save DIR, or "
              "remove the folder)\n");
  }
  EXPECT_EQ(content("runs/run/metrics.csv"), metrics);
  ASSERT_EQ(ballast(train + "--save kept").status, 0);
  const Outcome branch = ballast(train + "--resume runs/run/checkpoints/global_step1 --save kept");
  EXPECT_TRUE(contains(branch.output, "another run's checkpoints are there (kept, 1 of them")) << branch.output;
  // A run that was killed before it could name its only checkpoint the latest.
  std::filesystem::remove(folder_.path() / "kept/latest");
  const Outcome unnamed = ballast(train + "--save kept --resume --set train.steps=3");
  EXPECT_TRUE(contains(unnamed.output, "continues after step 2")) << unnamed.output;

  EXPECT_TRUE(contains(ballast(train + "--set train.name=new --keep-last 2").output,
                       "missing option (--save-every N, --save DIR or --resume beside --keep-last)"));
  folder_.write("file", "");
  const Outcome nowhere = ballast(train + "--set train.name=new --save file/kept");
  EXPECT_EQ(nowhere.status, 1);
  EXPECT_TRUE(contains(nowhere.output, "file/kept")) << nowhere.output;
  EXPECT_FALSE(contains(nowhere.output, "step 1/2")) << "found at the first save only: " << nowhere.output;
}

TEST_F(Program, MetricsLeadUpToTheCheckpointOrGoAside) {
  const std::string train = "train --config run.json --set train.steps=5 --set train.eval_every=0 --save kept ";
  ASSERT_EQ(ballast(train + "--save-every 2").status, 0);
  const Outcome again = ballast(train + "--resume global_step2");
  EXPECT_TRUE(contains(again.output, "continues after step 2; 3 later rows of the metrics are cut off\n"))
      << again.output;
  EXPECT_EQ(figures(content("runs/run/metrics.jsonl")).size(), 5U);
  // A run without checkpoints took the name.
  ASSERT_EQ(ballast("train --config run.json --set train.steps=4").status, 0);
  const Outcome mixed = ballast(train + "--resume global_step4");
  EXPECT_TRUE(contains(mixed.output,
                       "continues after step 4; the metrics begin here (those that were there don't lead "
                       "up to it: metrics.*.old)\n"))
      << mixed.output;
  EXPECT_EQ(figures(content("runs/run/metrics.jsonl")).size(), 1U);
  EXPECT_EQ(figures(content("runs/run/metrics.jsonl.old")).size(), 4U);
}

TEST_F(Program, AFileBesideTheRunThatCannotBeWrittenLosesNoSteps) {
  const Outcome outcome = ballast("train --config run.json --save kept --trace /dev/full --trace-steps 2:3");
  EXPECT_EQ(outcome.status, 1);
  for (const char* part : {"saved: kept/global_step4", "ballast: [trace.write] ", "No space left on device"})
    EXPECT_TRUE(contains(outcome.output, part)) << part << "\n" << outcome.output;
  EXPECT_EQ(content("kept/latest"), "global_step4");

  // At the last step nothing is cut short: the sample needs all ranks.
  const Outcome last = ballast("train --config run.json --sample 5 --trace /dev/full --trace-steps 5:6");
  EXPECT_EQ(last.status, 1);
  for (const char* part : {"sample of 5 bytes", "ballast: [trace.write] "})
    EXPECT_TRUE(contains(last.output, part)) << part << "\n" << last.output;
}

TEST_F(Program, InspectsAndVerifiesCheckpoints) {
  ASSERT_EQ(ballast("train --config run.json --set train.steps=2 --save kept").status, 0);
  const Outcome inspected = ballast("checkpoint inspect kept --names");
  EXPECT_EQ(inspected.status, 0);
  for (const char* part :
       {"kept/global_step2", "saved by 1 rank, stage 2, fp32, AdamW", "applied_steps 2", "token_embedding.weight",
        "exp_avg_sq in 1", "2 updates", "client state:\n  model: bias true, context 32, dropout 0.0, heads 2",
        "  train: drawn ", ", name \"run\", seed 0, step 2, windows "})
    EXPECT_TRUE(contains(inspected.output, part)) << part << "\n" << inspected.output;
  const std::string file = "kept/global_step2/rank-00000-of-00001.safetensors";
  for (const std::string way : {"", "/", "/.", "/manifest.json"})
    EXPECT_TRUE(contains(ballast("checkpoint verify kept/global_step2" + way).output, "global_step2: whole")) << way;
  std::string damaged = content(file);
  damaged[damaged.size() - 100] ^= 1;
  folder_.write(file, damaged);
  const Outcome verified = ballast("checkpoint verify kept");
  EXPECT_EQ(verified.status, 1);
  EXPECT_TRUE(contains(verified.output, "not what was written") && contains(verified.output, file)) << verified.output;
  EXPECT_EQ(ballast("checkpoint verify").status, 2);
  EXPECT_EQ(ballast("checkpoint verify nowhere").status, 1);
}

TEST_F(Program, ExportsImportsAndStartsFromWhatItExported) {
  ASSERT_EQ(ballast("train --config run.json --save kept").status, 0);
  const Outcome written = ballast("checkpoint export kept --to model --dtype bf16");
  EXPECT_EQ(written.status, 0) << written.output;
  EXPECT_TRUE(contains(written.output, "of weights in BF16")) << written.output;
  EXPECT_EQ(nlohmann::json::parse(content("model/config.json"))["n_embd"], 16);
  for (const std::string verb : {"checkpoint inspect", "checkpoint verify", "train --config run.json --resume"}) {
    const Outcome outcome = ballast(verb + " model");
    EXPECT_EQ(outcome.status, 1);
    EXPECT_TRUE(contains(outcome.output, "not a checkpoint but weights of Hugging Face's libraries (model; "))
        << outcome.output;
  }
  const Outcome into_a_run = ballast("checkpoint import model --to kept");
  EXPECT_EQ(into_a_run.status, 2);
  EXPECT_TRUE(contains(into_a_run.output, "a run's checkpoints are there (kept/global_step")) << into_a_run.output;
  EXPECT_EQ(ballast("checkpoint import model --to imported").status, 0);
  const Outcome again = ballast("checkpoint import model --to imported");
  EXPECT_EQ(again.status, 2);
  EXPECT_TRUE(contains(again.output, "an import is there already (imported/imported; ")) << again.output;
  EXPECT_TRUE(contains(ballast("checkpoint verify imported").output, "imported: whole"));
  const Outcome begun = ballast("train --config run.json --init imported --set train.name=begun");
  EXPECT_EQ(begun.status, 0) << begun.output;
  EXPECT_TRUE(contains(begun.output, "weights of imported/imported")) << begun.output;
}

TEST_F(Program, ExchangeWithoutItsWordsSaysWhichAreMissing) {
  const auto expect = [&](const std::string& words, int status, const std::string& part) {
    const Outcome outcome = ballast(words);
    EXPECT_EQ(outcome.status, status) << words;
    EXPECT_TRUE(contains(outcome.output, part)) << words << ": " << outcome.output;
  };
  expect("checkpoint export", 2, "missing word (PATH of checkpoint export)");
  expect("checkpoint export kept", 2, "missing option (--to FOLDER of checkpoint export)");
  expect("checkpoint import model", 2, "missing option (--to FOLDER of checkpoint import)");
  expect("checkpoint export kept --to out --dtype int8", 2, "int8");
  expect("checkpoint export kept --to out --max-shard-size 0", 2, "--max-shard-size");
  expect("checkpoint exprot kept", 2, "did you mean export?");
  expect("checkpoint export nowhere --to out", 1, "nowhere");
  expect("train --config run.json --init nowhere", 1, "no weights here (nowhere has neither config.json");
}

// A preemption: the launcher sends SIGTERM to all ranks, at one moment or another.
TEST_F(Program, SigtermSavesAndEndsAndAnotherStartGoesOn) {
  const auto launch = [&](const std::string& words, const std::string& meanwhile) {
    return two_ranks(
        "train --config run.json --set train.eval_every=0 --save kept --set save.asynchronous=true " + words,
        meanwhile);
  };
  const Outcome stopped = launch("--set train.steps=1000000 --save-every 3",
                                 "until [ -s kept/latest ]; do sleep 0.1; kill -0 $zero || exit 99; done; kill -TERM "
                                 "$zero $one");
  EXPECT_TRUE(contains(stopped.output, "statuses 130 130")) << stopped.output;
  EXPECT_TRUE(contains(stopped.output, "stopped after ")) << stopped.output;
  const std::string latest = content("kept/latest");
  ASSERT_EQ(latest.rfind("global_step", 0), 0U) << latest;
  const std::int64_t step = std::stoll(latest.substr(std::string("global_step").size()));
  EXPECT_TRUE(contains(stopped.output, "saved: kept/" + latest + " (--resume goes on with it)")) << stopped.output;
  EXPECT_EQ(static_cast<std::int64_t>(figures(content("runs/run/metrics.jsonl")).size()), step);
  const Outcome again = launch("--resume auto --set train.steps=" + std::to_string(step + 2), "true");
  EXPECT_TRUE(contains(again.output, "statuses 0 0")) << again.output;
  EXPECT_TRUE(contains(again.output, "continues after step " + std::to_string(step) + "\n")) << again.output;
  EXPECT_EQ(static_cast<std::int64_t>(figures(content("runs/run/metrics.jsonl")).size()), step + 2);
}

}  // namespace
}  // namespace ballast::cli
