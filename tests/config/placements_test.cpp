// Where model states live: what the keys read as, what contradicts, what is listed as without effect.
#include "tests/config/config_json.h"

namespace ballast {
namespace {

using nlohmann::json;
using testing::error_of;

json zero(const char* text) { return {{"zero_optimization", json::parse(text)}}; }

ZeroConfig read(const char* text) { return Config::from_json(zero(text)).zero; }

std::vector<std::string> notices(const char* text) { return Config::from_json(zero(text)).notices; }

TEST(Placement, OfNothingIsTheDevice) {
  const ZeroConfig config = read("{}");
  EXPECT_EQ(config.offload_optimizer.device, OffloadDevice::kNone);
  EXPECT_TRUE(config.offload_optimizer.pin_memory);
  EXPECT_EQ(config.offload_optimizer.nvme_path, "");
  EXPECT_EQ(config.offload_optimizer.ratio, 1);
  EXPECT_TRUE(config.offload_optimizer.pipeline_read);
  EXPECT_TRUE(config.offload_optimizer.pipeline_write);
  EXPECT_EQ(config.offload_optimizer.buffer_count, 4);
  EXPECT_EQ(config.offload_optimizer.threads, 0);
  EXPECT_EQ(config.offload_param.device, OffloadDevice::kNone);
  EXPECT_TRUE(config.offload_param.pin_memory);
  EXPECT_EQ(config.offload_param.nvme_path, "");
  EXPECT_EQ(config.offload_param.buffer_count, 5);
  EXPECT_EQ(config.offload_param.buffer_size, 0);
  EXPECT_EQ(config.offload_param.max_in_cpu, 1'000'000'000);
  EXPECT_EQ(config.offload_gradients.device, GradientDevice::kAuto);
  EXPECT_EQ(config.offload_gradients.nvme_path, "");
  EXPECT_EQ(config.sub_group_size, 16'777'216);
  EXPECT_EQ(gradient_device(config), OffloadDevice::kNone);
}

TEST(Placement, IsReadKeyByKeyAndWrittenBack) {
  const json root = zero(R"({
    "stage": 3, "sub_group_size": 65536,
    "offload_optimizer": {"device": "NVMe", "pin_memory": false, "nvme_path": "/nvme/a", "ratio": 0.75,
                          "pipeline_read": false, "pipeline_write": false, "buffer_count": 6, "threads": 12},
    "offload_param": {"device": "nvme", "pin_memory": false, "nvme_path": "/nvme/b", "buffer_count": 7,
                      "buffer_size": 1e6, "max_in_cpu": 0},
    "offload_gradients": {"device": "nvme", "nvme_path": "/nvme/c"}})");
  const Config config = Config::from_json(root);
  ZeroConfig want;
  want.stage = 3;
  want.sub_group_size = 65536;
  want.offload_optimizer = {OffloadDevice::kNvme, false, "/nvme/a", 0.75, false, false, 6, 12};
  want.offload_param = {OffloadDevice::kNvme, false, "/nvme/b", 7, 1'000'000, 0};
  want.offload_gradients = {GradientDevice::kNvme, "/nvme/c"};
  EXPECT_EQ(config.zero, want);
  EXPECT_EQ(gradient_device(config.zero), OffloadDevice::kNvme);
  EXPECT_TRUE(config.notices.empty());
  EXPECT_EQ(Config::from_json(config.to_json()), config);
}

TEST(Placement, OfStatesIsFreeInEveryStage) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const char* device : {"cpu", "nvme"}) {
      json root = zero(R"({"offload_optimizer": {"nvme_path": "/nvme"}})");
      root["zero_optimization"]["stage"] = stage;
      root["zero_optimization"]["offload_optimizer"]["device"] = device;
      EXPECT_EQ(error_of(root), "") << root;
    }
  }
}

TEST(Placement, OfGradientsFollowsTheStatesUnlessChosen) {
  const auto device = [](const char* text) { return gradient_device(read(text)); };
  EXPECT_EQ(device(R"({"offload_optimizer": {"device": "cpu"}})"), OffloadDevice::kCpu);
  EXPECT_EQ(device(R"({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}})"), OffloadDevice::kCpu);
  EXPECT_EQ(device(R"({"offload_optimizer": {"device": "cpu"}, "offload_gradients": {"device": "auto"}})"),
            OffloadDevice::kCpu);
  EXPECT_EQ(device(R"({"offload_optimizer": {"device": "cpu"}, "offload_gradients": {"device": "none"}})"),
            OffloadDevice::kNone);
  EXPECT_EQ(device(R"({"stage": 3, "offload_param": {"device": "cpu"}})"), OffloadDevice::kNone);
  EXPECT_TRUE(notices(R"({"offload_gradients": {"device": "auto"}})").empty());
}

TEST(Placement, OldFormsAreUnderstood) {
  EXPECT_EQ(read(R"({"stage": 3, "cpu_offload_param": true})").offload_param.device, OffloadDevice::kCpu);
  EXPECT_EQ(read(R"({"cpu_offload_param": false})"), ZeroConfig());
  EXPECT_EQ(read(R"({"cpu_offload": null, "cpu_offload_param": null, "offload_param": null})"), ZeroConfig());
  const ZeroConfig null_path = read(R"({"offload_optimizer": {"device": "cpu", "nvme_path": null}})");
  EXPECT_EQ(null_path.offload_optimizer.nvme_path, "");
}

TEST(Placement, ContradictionsNameBothSidesAndTheRemedy) {
  EXPECT_EQ(error_of(zero(R"({"stage": 2, "offload_param": {"device": "cpu"}})")),
            "[config.placements] contradiction (zero_optimization.offload_param.device = \"cpu\", "
            "zero_optimization.stage = 2; parameters are offloaded at stage 3: set the stage to 3, or the device to "
            "\"none\")");
  EXPECT_EQ(error_of(zero(R"({"cpu_offload_param": true})")),
            "[config.placements] contradiction (zero_optimization.offload_param.device = \"cpu\", "
            "zero_optimization.stage = 0; parameters are offloaded at stage 3: set the stage to 3, or the device to "
            "\"none\")");
  EXPECT_EQ(error_of(zero(R"({"stage": 3, "offload_gradients": {"device": "nvme", "nvme_path": "/nvme"}})")),
            "[config.placements] contradiction (zero_optimization.offload_gradients.device = \"nvme\", "
            "zero_optimization.offload_optimizer.device = \"none\"; gradients are offloaded to an update on the host: "
            "set offload_optimizer.device to \"cpu\" or \"nvme\", or leave offload_gradients out)");
  EXPECT_EQ(error_of(zero(R"({"stage": 3, "cpu_offload_param": true, "offload_param": {"device": "cpu"}})")),
            "[config.parse] given twice under two names (zero_optimization.cpu_offload_param, "
            "zero_optimization.offload_param.device; leave one out)");
  EXPECT_EQ(error_of(zero(R"({"cpu_offload": true, "offload_optimizer": {"device": "cpu"}})")),
            "[config.parse] given twice under two names (zero_optimization.cpu_offload, "
            "zero_optimization.offload_optimizer.device; leave one out)");
}

TEST(Placement, AsADeviceAloneIsShownAsItsSection) {
  EXPECT_EQ(error_of(zero(R"({"offload_optimizer": "cpu"})")),
            "[config.parse] wrong type (zero_optimization.offload_optimizer = \"cpu\"; want {\"device\": \"cpu\"})");
  EXPECT_EQ(error_of(zero(R"({"offload_param": 1})")),
            "[config.parse] wrong type (zero_optimization.offload_param = 1; want an object)");
  EXPECT_EQ(error_of({{"zero_optimization", "cpu"}}),
            "[config.parse] wrong type (zero_optimization = \"cpu\"; want an object)");
}

TEST(Placement, OnDiskWantsAFolder) {
  for (const char* section : {"offload_optimizer", "offload_param", "offload_gradients"}) {
    for (const json& path : {json(), json("")}) {
      json root = zero(R"({"stage": 3, "offload_optimizer": {"device": "cpu"}})");
      root["zero_optimization"][section] = {{"device", "nvme"}, {"nvme_path", path}};
      const std::string key = std::string("zero_optimization.") + section;
      EXPECT_EQ(error_of(root), "[config.placements] required key (" + key + ".nvme_path; " + key +
                                    ".device = \"nvme\" wants a folder on the disk that takes the swap files)");
    }
  }
}

TEST(Placement, FilledInCodeIsCheckedByTheSameRules) {
  ZeroConfig config;
  config.offload_optimizer.device = OffloadDevice::kNvme;
  EXPECT_THROW(check_placements(config), ConfigError);
  config.offload_optimizer.nvme_path = "/nvme";
  EXPECT_NO_THROW(check_placements(config));
  config.offload_param.device = OffloadDevice::kCpu;
  EXPECT_THROW(check_placements(config), ConfigError);
  config.stage = 3;
  EXPECT_NO_THROW(check_placements(config));
}

TEST(Placement, WhatAnotherPlacementWouldNeedIsListed) {
  EXPECT_EQ(
      notices(R"({"offload_optimizer": {"device": "cpu", "nvme_path": "/nvme", "ratio": 0.5}})"),
      std::vector<std::string>{"zero_optimization.offload_optimizer.nvme_path has no effect: the device is \"cpu\""});
  EXPECT_EQ(
      notices(R"({"offload_param": {"nvme_path": "/nvme"}})"),
      std::vector<std::string>{"zero_optimization.offload_param.nvme_path has no effect: the device is \"none\""});
  EXPECT_EQ(
      notices(R"({"offload_optimizer": {"ratio": 0.5}})"),
      std::vector<std::string>{"zero_optimization.offload_optimizer.ratio has no effect: the device is \"none\""});
  EXPECT_EQ(
      notices(R"({"offload_optimizer": {"device": "cpu"}, "offload_gradients": {"nvme_path": "/nvme"}})"),
      std::vector<std::string>{"zero_optimization.offload_gradients.nvme_path has no effect: the device is \"cpu\""});
  EXPECT_TRUE(notices(R"({"offload_optimizer": {"device": "cpu", "nvme_path": ""}})").empty());
}

TEST(SubGroupSize, BeyondTheGreatestChunkMeansIt) {
  EXPECT_EQ(read(R"({"sub_group_size": 16777216})").sub_group_size, 16'777'216);
  EXPECT_TRUE(notices(R"({"sub_group_size": 16777216})").empty());
  EXPECT_EQ(read(R"({"sub_group_size": 64})").sub_group_size, 64);
  EXPECT_EQ(read(R"({"sub_group_size": 1e9})").sub_group_size, 16'777'216);
  EXPECT_EQ(
      notices(R"({"sub_group_size": 1e9})"),
      std::vector<std::string>{"zero_optimization.sub_group_size = 1000000000 means 16777216, the greatest chunk"});
  EXPECT_EQ(error_of(zero(R"({"sub_group_size": 63})")),
            "[config.parse] out of range (zero_optimization.sub_group_size = 63; want an integer >= 64)");
}

}  // namespace
}  // namespace ballast
