// The device's time in a trace, where there is a CUDA device; elsewhere the program exits with 77.
#include "ballast/tiers/device_span.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>

#include "ballast/tiers/device_stream.h"

namespace ballast::tiers {
namespace {

constexpr double kAnchor = 1000;  // microseconds by which the two clocks may be taken to differ

TEST(DeviceSpan, ShowsWhenTheDeviceWorkedWhateverTheHostDidMeanwhile) {
  const c10::Device device(at::kCUDA, 0);
  const at::Tensor a = at::ones({4096, 4096}, at::TensorOptions(device));
  const at::Tensor host = at::empty({4096, 4096}, at::TensorOptions().pinned_memory(true));
  at::Tensor product = at::mm(a, a);  // what a first call costs is not to be measured
  product.sum().item();
  const DeviceStream copies(device);
  const auto micros = [](trace::Clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
  };

  trace::start();
  double queued = 0;
  {
    const DeviceSpan work(trace::Lane::kCompute, "first", {}, device);
    for (int i = 0; i < 50; ++i) product = at::mm(a, a);
    queued = micros(trace::Clock::now() - trace::started());
  }
  const DeviceMark between = DeviceMark::now(device);
  {
    const DeviceSpan work(trace::Lane::kCompute, "second", {}, device);
    for (int i = 0; i < 50; ++i) product = at::mm(a, a);
  }
  between.end(trace::Lane::kGather, "since the first");
  {
    copies.wait_for(DeviceStream::mark_current(device));
    const DeviceStream::Scope on(copies);
    const DeviceSpan copy(trace::Lane::kCopies, "copy", "of a product", device);
    host.copy_(product, /*non_blocking=*/true);
  }
  const DeviceMark unused = DeviceMark::now(device);
  copies.mark().synchronize();
  const double all = micros(trace::Clock::now() - trace::started());
  const auto file =
      std::filesystem::temp_directory_path() / ("ballast-device-span-" + std::to_string(::getpid()) + ".json");
  trace::write(file, 0);
  const auto json = nlohmann::json::parse(std::ifstream(file));
  std::filesystem::remove(file);

  std::map<std::string, std::pair<double, double>> spans;  // begin, end
  for (const auto& event : json["traceEvents"])
    if (event["ph"] == "X")
      spans[event["name"]] = {event["ts"].get<double>(), event["ts"].get<double>() + event["dur"].get<double>()};
  ASSERT_EQ(spans.size(), 4u) << json.dump(1);
  const auto [first, second, since, copy] =
      std::tuple(spans["first"], spans["second"], spans["since the first"], spans["copy of a product"]);
  EXPECT_GE(first.first, 0);
  EXPECT_GT(first.second, queued) << "the device was at it when the host had queued everything";
  EXPECT_LE(first.second, second.first);
  EXPECT_LE(first.second, since.first);
  EXPECT_LE(since.first, second.first);
  EXPECT_LE(second.second, since.second);
  EXPECT_LE(second.second, copy.first);
  EXPECT_LE(copy.second, all + kAnchor);
  EXPECT_GT(copy.second, copy.first);
}

TEST(DeviceSpan, WithTheRecorderOffThereIsNoEvent) {
  const DeviceMark off = DeviceMark::now(c10::Device(at::kCUDA, 0));
  trace::start();
  off.end(trace::Lane::kCompute, "begun while off");
  const auto file =
      std::filesystem::temp_directory_path() / ("ballast-device-span-" + std::to_string(::getpid()) + ".json");
  trace::write(file, 0);
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(file))["otherData"]["spans"], 0);
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace ballast::tiers
