#include "cli/run_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "tests/data/temporary_folder.h"

namespace ballast::cli {
namespace {

using nlohmann::json;

std::string error_of(const json& root) {
  try {
    RunFile::from_json(root, "run");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

json with(const char* text) {
  json root = json::parse(text);
  root["data"]["path"] = "text";
  return root;
}

TEST(RunFile, ReadsAllSections) {
  const RunFile run = RunFile::from_json(with(R"({
      "engine": {"managed_gradient_accumulation": false, "zero_optimization": {"stage": 2}},
      "model": {"layers": 2, "width": 32, "heads": 4, "context": 64},
      "data": {"format": "uint16", "extensions": [".bin"], "held_out": 0.1},
      "train": {"steps": 30, "window": [1, 4], "seed": 7},
      "sample": {"count": 9, "prompt": "x"}})"),
                                         "my-run");
  EXPECT_EQ(run.engine.zero.stage, 2);
  EXPECT_EQ(run.model.layers, 2);
  EXPECT_EQ(run.model.seed, 7u);
  EXPECT_EQ(run.data.format, data::TokenFormat::kUInt16);
  EXPECT_EQ(run.data.extensions, std::vector<std::string>{".bin"});
  EXPECT_EQ(run.train.name, "my-run");
  EXPECT_EQ(run.train.window_min, 1);
  EXPECT_EQ(run.train.window_max, 4);
  EXPECT_EQ(run.sample.prompt, "x");
}

TEST(RunFile, OneNumberIsAFixedWindow) {
  const RunFile run = RunFile::from_json(
      with(R"({"engine": {"managed_gradient_accumulation": false}, "train": {"window": 3}})"), "run");
  EXPECT_EQ(run.train.window_min, 3);
  EXPECT_EQ(run.train.window_max, 3);
}

TEST(RunFile, EffectiveFormReadsBackAsTheSameRun) {
  for (const bool managed : {true, false}) {
    json root = with(R"({"model": {"layers": 2, "width": 32, "heads": 4}, "sample": {"count": 3}})");
    root["engine"]["managed_gradient_accumulation"] = managed;
    if (!managed) root["train"]["window"] = {2, 5};
    const json effective = RunFile::from_json(root, "run").to_json();
    EXPECT_EQ(RunFile::from_json(effective, "another").to_json(), effective);
  }
}

TEST(RunFile, AScheduleThatEndsTakesTheRunsSteps) {
  const auto total = [](const char* scheduler) {
    json root = with(R"({"train": {"steps": 77}})");
    root["engine"]["scheduler"] = json::parse(scheduler);
    return RunFile::from_json(root, "run").engine.scheduler.total_num_steps;
  };
  EXPECT_EQ(total(R"({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}})"), 77);
  EXPECT_EQ(total(R"({"type": "warmupdecaylr"})"), 77);
  EXPECT_EQ(total(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})"), 77);
  EXPECT_EQ(total(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 50}})"), 50);
}

TEST(RunFile, ErrorsNameKeyAndRemedy) {
  EXPECT_EQ(error_of(json::parse("{}")), "[config.parse] required key (data.path; want text)");
  EXPECT_EQ(error_of(with(R"({"zero_optimization": {"stage": 2}})")),
            "[config.parse] a key of the engine's configuration outside of it (zero_optimization = {\"stage\":2}; want "
            "the whole configuration under \"engine\", and the text under data.path: {\"engine\": "
            "{\"zero_optimization\": ...}, \"data\": {\"path\": ...}})");
  EXPECT_EQ(error_of(with(R"({"trian": {}})")), "[config.parse] unknown key (trian = {}; nearest known key: train)");
  EXPECT_EQ(error_of(with(R"({"engine": {"zero_optimization": {"stagee": 2}}})")),
            "[config.parse] unknown key (engine.zero_optimization.stagee = 2; nearest known key: "
            "engine.zero_optimization.stage)");
  EXPECT_EQ(error_of(with(R"({"train": {"window": [1, 4]}})")),
            "[config.parse] contradiction (train.window = [1,4] with managed windows; set "
            "engine.managed_gradient_accumulation to false, or engine.gradient_accumulation_steps in its place)");
  EXPECT_EQ(error_of(with(R"({"train": {"window": null}})")), "");
  EXPECT_EQ(error_of(with(R"({"model": {"vocabulary": 100}})")),
            "[config.parse] contradiction (model.vocabulary = 100 with data.format = \"bytes\"; want at least 256)");
  EXPECT_EQ(error_of(with(R"({"model": {"width": 30}})")),
            "[models.gpt] width must be a multiple of heads (width = 30, heads = 12)");
  EXPECT_EQ(error_of(with(R"({"train": {"name": "a/b"}})")),
            "[config.parse] out of range (train.name = \"a/b\"; want the name of a folder)");
  EXPECT_EQ(error_of(with(R"({"model": 3})")), "[config.parse] wrong type (model = 3; want an object)");
}

TEST(RunFile, ErrorsOfTheEnginesKeysNameTheirSection) {
  const auto engine = [](const char* text) {
    return error_of({{"data", {{"path", "text"}}}, {"engine", json::parse(text)}});
  };
  EXPECT_EQ(engine("3"), "[config.parse] wrong type (engine = 3; want an object)");
  EXPECT_EQ(engine(R"({"zero_optimization": {"stage": 4}})"),
            "[config.parse] out of range (engine.zero_optimization.stage = 4; want an integer in [0, 3])");
  EXPECT_EQ(
      engine(R"({"bf16": {"enabled": true}, "fp16": {"enabled": true}})"),
      "[config.parse] contradiction (engine.fp16.enabled = true, engine.bf16.enabled = true; enable one of them)");
  EXPECT_EQ(
      engine(R"({"zero_optimization": {"offload_param": {"device": "cpu"}}})"),
      "[config.placements] contradiction (engine.zero_optimization.offload_param.device = \"cpu\", "
      "engine.zero_optimization.stage = 0; parameters are offloaded at stage 3: set the stage to 3, or the device "
      "to \"none\")");
  EXPECT_EQ(
      engine(R"({"zero_optimization": {"offload_optimizer": "cpu"}})"),
      "[config.parse] wrong type (engine.zero_optimization.offload_optimizer = \"cpu\"; want {\"device\": \"cpu\"})");
  EXPECT_EQ(engine(R"({"optimizer": {"params": {"groups": [{"patterns": "*", "lrr": 1}]}}})"),
            "[config.parse] unknown key (engine.optimizer.params.groups[0].lrr = 1; nearest known key: "
            "engine.optimizer.params.groups[].lr)");
  EXPECT_EQ(
      engine(R"({"optimizer": {"type": "SGD", "params": {"eps": 1}}})"),
      "[config.parse] not a parameter of this optimizer (engine.optimizer.params.eps = 1; only with optimizer.type "
      "Adam, AdamW)");
  EXPECT_EQ(
      engine(R"({"tensorboard": {"enabled": true}})").find("[config.parse] not supported (engine.tensorboard.enabled"),
      0u);
  EXPECT_EQ(RunFile::from_json(with(R"({"engine": {"prescale_gradients": true}})"), "run")
                .engine.notices.at(0)
                .find("engine.prescale_gradients has no effect"),
            0u);
}

TEST(RunFile, ChangesAreMadeBeforeAnythingIsChecked) {
  data::TemporaryFolder folder;
  const auto file = folder.write("tiny.json", R"({"train": {"steps": "wrong"}})");
  const RunFile run = RunFile::load(file, {"train.steps=12", "data.path=a=b", "engine.zero_optimization.stage=3",
                                           "data.extensions=[\".py\"]", "engine.bf16.enabled=true"});
  EXPECT_EQ(run.train.name, "tiny");
  EXPECT_EQ(run.train.steps, 12);
  EXPECT_EQ(run.data.path, "a=b");
  EXPECT_EQ(run.engine.zero.stage, 3);
  EXPECT_EQ(run.data.extensions, std::vector<std::string>{".py"});
  EXPECT_TRUE(run.engine.bf16);
}

TEST(RunFile, AChangeOfAnotherFormIsAnError) {
  json root = json::parse(R"({"train": {"steps": 3}})");
  const auto error = [&](const std::string& change) {
    try {
      apply_change(root, change);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(error("train.steps"),
            "[cli.set] not a change (train.steps; want section.key=value, as in train.steps=100)");
  EXPECT_EQ(error("train.steps.more=1"), "[cli.set] not an object on the way (train.steps = 3 in train.steps.more=1)");
}

GivenModel given_llama() {
  GivenModel given{{}, "weights"};
  given.options.layers = 2;
  given.options.width = 32;
  given.options.heads = 4;
  given.options.key_heads = 2;
  given.options.context = 64;
  given.options.positions = models::PositionKind::kRotary;
  given.options.mlp = models::MlpKind::kSwiglu;
  return given;
}

TEST(RunFile, TakesAGivenModelForWhatItLeavesOut) {
  const data::TemporaryFolder folder;
  const auto load = [&](const char* model, const GivenModel& given) {
    const auto file = folder.write("run.json", std::string(R"({"data": {"path": "text"}, "model": )") + model + "}");
    return RunFile::load(file, {"train.seed=3"}, given).model;
  };
  const models::GptOptions taken = load("null", given_llama());
  EXPECT_EQ(taken.heads, 4);
  EXPECT_EQ(taken.key_width(), 16);
  EXPECT_EQ(taken.hidden_width(), 128);  // 85.3 in whole 64s
  EXPECT_EQ(taken.mlp, models::MlpKind::kSwiglu);
  EXPECT_EQ(taken.context, 64);
  EXPECT_EQ(taken.seed, 3u);
  const models::GptOptions own =
      load(R"({"context": 16, "dropout": 0.5, "mlp_width": 128, "layers": 2})", given_llama());
  EXPECT_EQ(own.context, 16);
  EXPECT_EQ(own.dropout, 0.5);
}

TEST(RunFile, AGivenModelThatItContradictsIsAnError) {
  const data::TemporaryFolder folder;
  const auto error = [&](const char* model, const GivenModel& given) {
    const auto file = folder.write("run.json", std::string(R"({"data": {"path": "text"}, "model": )") + model + "}");
    return data::error_text<ConfigError>(folder, [&] { RunFile::load(file, {}, given); });
  };
  EXPECT_EQ(
      error(R"({"key_heads": 0})", given_llama()),
      "[config.parse] contradiction (model.key_heads = 4, that of the weights in weights = 2; leave the key out)");
  EXPECT_EQ(
      error(R"({"mlp_width": 96})", given_llama()),
      "[config.parse] contradiction (model.mlp_width = 96, that of the weights in weights = 128; leave the key out)");
  GivenModel learned = given_llama();
  learned.options.positions = models::PositionKind::kLearned;
  EXPECT_EQ(
      error(R"({"context": 16})", learned),
      "[config.parse] contradiction (model.context = 16, that of the weights in weights = 64; leave the key out)");
  EXPECT_EQ(error(R"({"heads": 1})", given_llama()),
            "[config.parse] contradiction (model.heads = 1, that of the weights in weights = 4; leave the key out)");
  EXPECT_NE(error("3", learned).find("wrong type (model = 3"), std::string::npos);
  EXPECT_NE(error(R"({"layer": 3})", learned).find("unknown key (model.layer = 3"), std::string::npos);
}

TEST(RunFile, TheModelsSectionAloneReadsBack) {
  const models::GptOptions options = given_llama().options;
  const json section = model_to_json(options);
  EXPECT_EQ(section["positions"], "rotary");
  EXPECT_EQ(model_to_json(model_from_json(section)), section);
  EXPECT_THROW(model_from_json({{"width", 7}, {"heads", 2}}), ConfigError);
}

TEST(RunFile, ExamplesAreRuns) {
  for (const char* name : {"demo", "demo-large"}) {
    const RunFile run = RunFile::load(std::string(BALLAST_SOURCE_DIR "/examples/") + name + ".json", {});
    EXPECT_EQ(run.train.name, name);
    EXPECT_TRUE(run.engine.notices.empty());
  }
}

TEST(RunFile, IsToldFromAnEnginesConfiguration) {
  EXPECT_TRUE(is_run_file(json::parse(R"({"engine": {}})")));
  EXPECT_TRUE(is_run_file(json::parse(R"({"train": {}, "zero_optimization": {}})")));
  EXPECT_FALSE(is_run_file(json::parse(R"({"zero_optimization": {"stage": 1}})")));
  EXPECT_FALSE(is_run_file(json::parse("[]")));
}

}  // namespace
}  // namespace ballast::cli
