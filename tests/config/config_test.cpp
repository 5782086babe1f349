#include <cstdio>
#include <filesystem>
#include <fstream>

#include "ballast/base/remove_tree.h"
#include "ballast/config/json_text.h"
#include "tests/config/config_json.h"

namespace ballast {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::error_of_text;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// DeepSpeed#653, #7889: a misspelled key, loss scales that are no scale, an empty window, a number with a letter.
TEST(Case39, WrongValuesAreErrorsWithKeyAndValue) {
  struct Row {
    const char* text;
    const char* key_and_value;
  };
  for (const Row& row : {
           Row{R"({"gradient_clipp1ng": 1.0})", "gradient_clipp1ng = 1.0; nearest known key: gradient_clipping"},
           Row{R"({"fp16": {"loss_scale": "inf"}})", "fp16.loss_scale = \"inf\""},
           Row{R"({"fp16": {"loss_scale": "NaN"}})", "fp16.loss_scale = \"NaN\""},
           Row{R"({"fp16": {"loss_scale": -1}})", "fp16.loss_scale = -1"},
           Row{R"({"fp16": {"loss_scale": true}})", "fp16.loss_scale = true"},
           Row{R"({"fp16": {"loss_scale_window": 0}})", "fp16.loss_scale_window = 0"},
           Row{R"({"zero_optimization": {"reduce_bucket_size": "5e8x"}})",
               "zero_optimization.reduce_bucket_size = \"5e8x\""},
       }) {
    EXPECT_TRUE(contains(error_of_text(row.text), row.key_and_value)) << row.text << ": " << error_of_text(row.text);
  }
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(contains(error_of({{"fp16", {{"loss_scale", infinity}}}}), "fp16.loss_scale = inf; want a number >= 0"));
  EXPECT_TRUE(contains(error_of({{"fp16", {{"loss_scale", -infinity}}}}), "fp16.loss_scale = -inf"));
  EXPECT_TRUE(contains(error_of({{"fp16", {{"loss_scale", std::nan("")}}}}), "fp16.loss_scale = nan"));
  for (const char* text : {R"({"gradient_clipping": NaN})", R"({"gradient_clipping": Infinity})",
                           R"({"gradient_clipping": 1e999})", R"({"zero_optimization": {"stage": 5e8x}})"}) {
    EXPECT_TRUE(contains(error_of_text(text), "not JSON")) << text;
  }
}

TEST(Case39, TheBatchTriangleAtTwoRanks) {
  struct Row {
    std::optional<std::int64_t> train, micro, steps;
    BatchShape want;
  };
  constexpr auto none = std::nullopt;
  for (const Row& row : {
           Row{8, 2, none, {8, 2, 2}},
           Row{none, 2, 2, {8, 2, 2}},
           Row{8, none, 2, {8, 2, 2}},
           Row{8, none, none, {8, 4, 1}},
           Row{none, 3, none, {6, 3, 1}},
           Row{8, 2, 2, {8, 2, 2}},
           Row{none, none, 3, {6, 1, 3}},
           Row{none, none, none, {2, 1, 1}},
       }) {
    Config config;
    config.train_batch_size = row.train;
    config.train_micro_batch_size_per_gpu = row.micro;
    config.gradient_accumulation_steps = row.steps;
    const BatchShape got = resolve_batch(config, 2);
    EXPECT_EQ(got.train_batch, row.want.train_batch);
    EXPECT_EQ(got.micro_batch, row.want.micro_batch);
    EXPECT_EQ(got.accumulation_steps, row.want.accumulation_steps);
  }
}

TEST(Case39, AContradictoryBatchShowsAllThreeNumbersAndTheRanks) {
  struct Row {
    const char* text;
    const char* numbers;
  };
  for (const Row& row : {
           Row{R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1})",
               "train_batch_size = 8, train_micro_batch_size_per_gpu = 3, gradient_accumulation_steps = 1, ranks = 2"},
           Row{R"({"train_batch_size": 7})",
               "train_batch_size = 7, train_micro_batch_size_per_gpu = not given, gradient_accumulation_steps = not "
               "given, ranks = 2"},
           Row{R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4})",
               "train_batch_size = 8, train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps = 4, ranks = 2"},
           Row{R"({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4})",
               "train_batch_size = 2, train_micro_batch_size_per_gpu = 4"},
           Row{R"({"train_micro_batch_size_per_gpu": 9e18, "gradient_accumulation_steps": 9})", "too large"},
       }) {
    try {
      resolve_batch(Config::from_string(row.text), 2);
      ADD_FAILURE() << "accepted: " << row.text;
    } catch (const ConfigError& error) {
      EXPECT_TRUE(contains(error.what(), row.numbers)) << error.what();
    }
  }
}

TEST(Batch, ThatFitsNoNumberOfRanksIsRefusedBeforeTheyAreKnown) {
  const auto error = [](const char* text) -> std::string {
    try {
      check_batch(Config::from_string(text), "engine.");
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3})"),
            "[config.batch] the batch sizes fit no number of ranks (engine.train_batch_size = 8, "
            "engine.train_micro_batch_size_per_gpu = 3, engine.gradient_accumulation_steps = not given; want train = "
            "micro * steps * ranks)");
  EXPECT_NE(error(R"({"train_batch_size": 8, "gradient_accumulation_steps": 16})"), "");
  EXPECT_NE(
      error(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 9e18, "gradient_accumulation_steps": 9})"),
      "");
  EXPECT_EQ(error(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})"),
            "");
  EXPECT_EQ(error(R"({"train_batch_size": 7})"), "");
  EXPECT_EQ(error(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5})"), "");
}

TEST(Case46, WrongValuesAreErrorsWithKeyAndValue) {
  EXPECT_EQ(error_of_text(R"({"gradient_clipping": -1})"),
            "[config.parse] out of range (gradient_clipping = -1; want a number >= 0)");
  EXPECT_EQ(error_of({{"gradient_clipping", std::nan("")}}),
            "[config.parse] out of range (gradient_clipping = nan; want a number >= 0)");
  EXPECT_EQ(error_of_text(R"({"gradient_clipping": "1.0"})"),
            "[config.parse] wrong type (gradient_clipping = \"1.0\"; want a number >= 0)");
  EXPECT_EQ(error_of_text(R"({"managed_gradient_accumulation": "no"})"),
            "[config.parse] wrong type (managed_gradient_accumulation = \"no\"; want true or false)");
  EXPECT_EQ(error_of_text(R"({"gradient_accumulation_steps": 0})"),
            "[config.parse] out of range (gradient_accumulation_steps = 0; want an integer >= 1, or null)");
}

TEST(Config, ReadsADeepSpeedUsersFile) {
  const Config config = Config::from_string(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "gradient_clipping": 1, "steps_per_print": 2000, "wall_clock_breakdown": true,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12,
             "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 0.25},
    "bf16": {"enabled": true},
    "communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "bf16"},
    "optimizer": {"type": "adamw", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7,
                                              "torch_adam": true,
                                              "groups": [{"patterns": ["*.bias", "*norm*"], "weight_decay": 0},
                                                         {"patterns": "head.*", "lr": 1e-3, "betas": [0.5, 0.6]}]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-5,
                                                      "warmup_num_steps": 50, "warmup_type": "linear",
                                                      "total_num_steps": 1e3}},
    "zero_optimization": {"stage": 3, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9,
                          "reduce_bucket_size": 5e6, "allgather_bucket_size": 4000000,
                          "stage3_max_live_parameters": 1e8, "stage3_max_reuse_distance": 1e9,
                          "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1e4,
                          "stage3_model_persistence_threshold": 123456789,
                          "stage3_gather_16bit_weights_on_model_save": true,
                          "offload_optimizer": {"device": "cpu", "pin_memory": false, "ratio": 1.0},
                          "offload_param": {"device": "none", "pin_memory": true},
                          "leaf_module": {"names": "blocks.3.moe", "name_suffixes": ["moe", "experts"]}},
    "activation_checkpointing": {"partition_activations": true},
    "flops_profiler": {"enabled": false, "profile_step": 1}, "wandb": {"enabled": false},
    "managed_gradient_accumulation": false, "comm_timeout_seconds": 12.5
  })");
  EXPECT_EQ(config.train_batch_size, std::nullopt);
  EXPECT_EQ(config.train_micro_batch_size_per_gpu, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 2);
  EXPECT_FALSE(config.managed_gradient_accumulation);
  EXPECT_EQ(config.gradient_clipping, 1);
  EXPECT_EQ(config.steps_per_print, 2000);
  EXPECT_TRUE(config.wall_clock_breakdown);
  EXPECT_EQ(config.comm_timeout_seconds, 12.5);
  EXPECT_EQ(config.fp16, (Fp16Config{false, 0, 12, 500, 3, true, 0.25}));
  EXPECT_TRUE(config.bf16);
  EXPECT_EQ(config.communication_data_type, DType::kFloat32);
  EXPECT_EQ(config.grad_accum_dtype, DType::kBFloat16);

  EXPECT_EQ(config.optimizer.type, OptimizerType::kAdamW);
  OptimizerHyper hyper{.lr = 3e-5, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 3e-7};
  EXPECT_EQ(config.optimizer.hyper, hyper);
  ASSERT_EQ(config.optimizer.groups.size(), 2u);
  EXPECT_EQ(config.optimizer.groups[0].patterns, (std::vector<std::string>{"*.bias", "*norm*"}));
  OptimizerHyper first = hyper, second = hyper;
  first.weight_decay = 0;
  second.lr = 1e-3, second.beta1 = 0.5, second.beta2 = 0.6;
  EXPECT_EQ(config.optimizer.groups[0].hyper, first);
  EXPECT_EQ(config.optimizer.groups[1].patterns, std::vector<std::string>{"head.*"});
  EXPECT_EQ(config.optimizer.groups[1].hyper, second);

  EXPECT_EQ(config.scheduler,
            (SchedulerConfig{SchedulerType::kWarmupDecayLr, 1e-6, 3e-5, 50, WarmupType::kLinear, 1000, 0, 0.0001, -1}));
  ZeroConfig zero;
  zero.stage = 3;
  zero.overlap_comm = false;
  zero.reduce_bucket_size = 5'000'000;
  zero.allgather_bucket_size = 4'000'000;
  zero.stage3_max_live_parameters = 100'000'000;
  zero.stage3_prefetch_bucket_size = 0;
  zero.stage3_param_persistence_threshold = 10'000;
  zero.stage3_model_persistence_threshold = 123'456'789;
  zero.offload_optimizer.device = OffloadDevice::kCpu;
  zero.offload_optimizer.pin_memory = false;
  zero.sub_group_size = kMaxSubGroupSize;  // 1e9 means the greatest one
  zero.leaf_module = {{"blocks.3.moe"}, {"moe", "experts"}};
  EXPECT_EQ(config.zero, zero);

  EXPECT_EQ(config.notices.size(), 10u);  // two "auto", five without effect, a sub-group, one group's lr, a divisor

  Config again = Config::from_json(config.to_json());
  again.notices = config.notices;
  EXPECT_EQ(config, again);
  EXPECT_EQ(Config::from_string(describe(config)).to_json(), config.to_json());
}

TEST(Config, OfAnEmptyObjectHasTheDefaultsOfCode) {
  EXPECT_EQ(Config::from_string("{}"), Config());
  EXPECT_EQ(Config::from_json(Config().to_json()), Config());
  EXPECT_EQ(Config().to_json()["zero_optimization"]["stage3_model_persistence_threshold"], 9223372036854775807);
  EXPECT_EQ(Config::from_string(R"({"fp16": null, "zero_optimization": {"offload_optimizer": null}})"), Config());
}

TEST(Config, AdamIsAdamWUnlessItsModeIsSwitchedOff) {
  const auto type = [](const char* optimizer) {
    return Config::from_string(std::string(R"({"optimizer": )") + optimizer + "}").optimizer.type;
  };
  EXPECT_EQ(type(R"({"type": "Adam"})"), OptimizerType::kAdamW);
  EXPECT_EQ(type(R"({"type": "Adam", "params": {"adam_w_mode": "auto"}})"), OptimizerType::kAdamW);
  EXPECT_EQ(type(R"({"type": "Adam", "params": {"adam_w_mode": true}})"), OptimizerType::kAdamW);
  EXPECT_EQ(type(R"({"type": "Adam", "params": {"adam_w_mode": false}})"), OptimizerType::kAdam);
  EXPECT_EQ(type(R"({"type": "SGD", "params": {"momentum": 0.9, "nesterov": true}})"), OptimizerType::kSgd);
  EXPECT_EQ(type(R"({"type": "lion"})"), OptimizerType::kLion);
  Config adam;
  adam.optimizer.type = OptimizerType::kAdam;
  EXPECT_EQ(Config::from_json(adam.to_json()), adam);
}

TEST(Config, OldFormsAreUnderstood) {
  EXPECT_TRUE(Config::from_string(R"({"bfloat16": {"enabled": true}})").bf16);
  EXPECT_EQ(Config::from_string(R"({"zero_optimization": {"cpu_offload": true}})").zero.offload_optimizer.device,
            OffloadDevice::kCpu);
  EXPECT_EQ(Config::from_string(R"({"zero_optimization": {"max_live_parameters": 5}})").zero.stage3_max_live_parameters,
            5);
}

TEST(Config, ContradictionsAreErrorsThatShowBothSides) {
  struct Row {
    const char* text;
    const char* want;
  };
  for (const Row& row : {
           Row{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})", "fp16.enabled = true, bf16.enabled = true"},
           Row{R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})",
               "adam_w_mode = false with optimizer.type = \"AdamW\""},
           Row{R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})", "nesterov = true, momentum = 0"},
           Row{R"({"optimizer": {"type": "SGD", "params": {"groups": [{"patterns": "*", "nesterov": true}]}}})",
               "groups[0].nesterov = true"},
           Row{R"({"fp16": {"enabled": true, "initial_scale_power": 3, "min_loss_scale": 16}})", "min_loss_scale = 16"},
           Row{R"({"scheduler": {"type": "WarmupCosineLR"}})", "required key (scheduler.params.total_num_steps"},
           Row{R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})",
               "total_num_steps, which nothing fills in here; want an integer >= 1"},
           Row{R"({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}})",
               "given twice under two names"},
           Row{R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})", "bfloat16.enabled = true"},
           Row{R"({"optimizer": {"params": {"groups": [{"lr": 1}]}}})", "groups[0]"},
           Row{R"({"optimizer": {"params": {"groups": [{"params": "*.bias", "lr": 1}]}}})",
               "groups[0].params = \"*.bias\"; nearest known key: optimizer.params.groups[].patterns, which chooses"},
           Row{R"({"optimizer": {"params": {"groups": [{"patterns": "*", "weight_decy": 1}]}}})",
               "nearest known key: optimizer.params.groups[].weight_decay)"},
           Row{R"({"zero_optimization": true})", "zero_optimization = true; want an object"},
           Row{R"({"amp": true})", "amp = true; want an object"},
           Row{R"({"amp": {"enabled": true}})", "amp.enabled = true; Apex AMP is not supported; use bf16.enabled"},
           Row{R"({"amp": {"enabled": 0}})", "amp.enabled = 0"},
           Row{R"({"optimizer": {"typ": "SGD", "params": {"momentum": 0.9}}})", "nearest known key: optimizer.type"},
           Row{R"([1])", "want an object"},
       }) {
    EXPECT_TRUE(contains(error_of_text(row.text), row.want)) << row.text << ": " << error_of_text(row.text);
  }
}

TEST(Config, ADivisorOfCallerOwnedWindowsIsListed) {
  const auto notices = [](const char* text) { return Config::from_string(text).notices; };
  EXPECT_EQ(notices(R"({"managed_gradient_accumulation": false, "gradient_accumulation_steps": 4})"),
            std::vector<std::string>{
                "gradient_accumulation_steps = 4 divides what backwards without a weight bring, however many a window "
                "has: managed_gradient_accumulation is false"});
  EXPECT_TRUE(notices(R"({"managed_gradient_accumulation": false, "gradient_accumulation_steps": 1})").empty());
  EXPECT_TRUE(notices(R"({"gradient_accumulation_steps": 4})").empty());
}

TEST(Config, ARateThatAScheduleTakesOverIsListed) {
  const Config config = Config::from_string(R"({
    "optimizer": {"params": {"groups": [{"patterns": "a", "weight_decay": 1}, {"patterns": "b", "lr": 0.5}]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}})");
  ASSERT_EQ(config.notices.size(), 1u);
  EXPECT_TRUE(contains(config.notices[0], "optimizer.params.groups[1].lr has no effect")) << config.notices[0];
  const auto decay = [](const std::string& lr, const std::string& peak) {
    return Config::from_string(R"({"optimizer": {"params": {"lr": )" + lr +
                               R"(}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9,
                               "warmup_num_steps": 3)" +
                               peak + "}}}")
        .notices;
  };
  EXPECT_EQ(decay("0.0001", ""),
            std::vector<std::string>{"optimizer.params.lr = 0.0001 has no effect: WarmupDecayLR rises to its own "
                                     "warmup_max_lr, which is 0.001 where scheduler.params doesn't set it"});
  EXPECT_TRUE(decay("0.001", "").empty());
  EXPECT_TRUE(decay("0.0001", R"(, "warmup_max_lr": 0.0001)").empty());
}

TEST(JsonText, ErrorsNameLineAndColumn) {
  EXPECT_TRUE(contains(error_of_text("{\n  \"a\": 1,\n  \"b\" 2\n}"), "line 3, column 7"))
      << error_of_text("{\n\"b\" 2}");
  EXPECT_TRUE(contains(error_of_text("{\n  // why\n}"), "JSON has no comments"));
  EXPECT_TRUE(contains(error_of_text("{\n  # why\n}"), "JSON has no comments"));
  EXPECT_TRUE(contains(error_of_text("{\"a\": 1,}"), "line 1, column 9"));
  EXPECT_TRUE(contains(error_of_text(""), "line 1, column 1"));
}

TEST(JsonText, AKeyTwiceInOneObjectIsAnError) {
  EXPECT_TRUE(contains(error_of_text(R"({"bf16": {"enabled": true, "enabled": false}})"),
                       "a key stands twice in one object (bf16.enabled; configuration text)"));
  EXPECT_EQ(parse_json(R"({"a": {"x": 1}, "b": [{"x": 1}, {"x": 2}]})", "text")["b"][1]["x"], 2);
}

TEST(JsonText, AFileThatCannotBeReadNamesPathAndReason) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "ballast config test";
  std::filesystem::create_directories(folder);
  const auto error = [](const std::filesystem::path& file) -> std::string {
    try {
      Config::from_file(file);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  const std::string missing = (folder / "none.json").string();
  EXPECT_EQ(error(missing), "[config.read] cannot read (" + missing + ": No such file or directory)");
  EXPECT_TRUE(contains(error(folder), "it is a folder"));
  const std::filesystem::path file = folder / "run.json";
  std::ofstream(file) << "{\"zero_optimization\": {\"stage\": 2}\n";
  EXPECT_TRUE(contains(error(file), file.string() + ", line 2, column 1")) << error(file);
  std::ofstream(file) << "{\"zero_optimization\": {\"stage\": 2}}";
  EXPECT_EQ(Config::from_file(file).zero.stage, 2);
  remove_tree(folder);
}

}  // namespace
}  // namespace ballast
