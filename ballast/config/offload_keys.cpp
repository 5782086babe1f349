#include "ballast/config/bind.h"

/// Where states live and how they travel. What contradicts among these keys is in placements.cpp.
namespace ballast::schema {

namespace {

using nlohmann::json;
using Keys = std::vector<Key<Config>>;

const std::string kZero = "zero_optimization.";
const std::vector<std::string> kDevices{"none", "cpu", "nvme"};                  // in the order of OffloadDevice
const std::vector<std::string> kGradientDevices{"auto", "none", "cpu", "nvme"};  // and of GradientDevice
constexpr double kMostBuffers = 1024;

/// An old form of `section.device` = "cpu": read, never written.
template <class Section>
Key<Config> old_form(const std::string& name, const std::string& section, Section of) {
  Key<Config> key;
  key.info = {.path = kZero + name,
              .allowed = or_null(boolean()),
              .meaning = "Old form of `" + kZero + section + ".device` = \"cpu\".",
              .fallback = "false"};
  key.read = [allowed = key.info.allowed, of](Config& config, const json& value, const std::string& path) {
    if (!value.is_null() && read_bool(value, allowed, path)) of(config).device = OffloadDevice::kCpu;
  };
  return key;
}

template <class Section>
Key<Config> nvme_path(const std::string& section, Section of) {
  return bind<Config>(
      {.path = kZero + section + ".nvme_path",
       .allowed = or_null(text()),
       .meaning = "Folder of the swap files where device is nvme; required there."},
      [of](auto& c) -> auto& { return of(c).nvme_path; });
}

void add_optimizer(Keys& keys) {
  const std::string offload = kZero + "offload_optimizer.";
  const auto section = [](auto& c) -> auto& { return c.zero.offload_optimizer; };
  keys.push_back(bind<Config>(
      {.path = offload + "device",
       .allowed = choice(kDevices),
       .meaning = "Where master weights and optimizer states live: none, on the compute device; cpu, in host memory; "
                  "nvme, on disk. In every stage."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.device; }));
  keys.push_back(old_form("cpu_offload", "offload_optimizer", section));
  keys.push_back(bind<Config>(
      {.path = offload + "pin_memory",
       .allowed = boolean(),
       .meaning = "Page-lock the host memory of states and gradients, for copies at full speed. Only where the compute "
                  "device is an accelerator (DeepSpeed: false)."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.pin_memory; }));
  keys.push_back(nvme_path("offload_optimizer", section));
  keys.push_back(bind<Config>(
      {.path = offload + "ratio",
       .allowed = number(0, 1),
       .meaning = "Share of the states that is offloaded; the rest, the first units in forward order, stays on the "
                  "compute device and is updated there. In every stage (DeepSpeed: stage 3, and only to host memory)."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.ratio; }));
  keys.push_back(bind<Config>(
      {.path = offload + "pipeline_read",
       .allowed = boolean(),
       .meaning = "nvme: read the next chunks during the update of one (DeepSpeed: false)."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.pipeline_read; }));
  keys.push_back(bind<Config>(
      {.path = offload + "pipeline_write",
       .allowed = boolean(),
       .meaning = "nvme: write the last chunks during the update of one (DeepSpeed: false)."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.pipeline_write; }));
  keys.push_back(bind<Config>(
      {.path = offload + "buffer_count",
       .allowed = integer(2, kMostBuffers),
       .meaning = "nvme: chunks in host memory at a time: being read, updated, or written."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.buffer_count; }));
  keys.push_back(bind<Config>(
      {.path = offload + "threads",
       .allowed = integer(0, 4096),
       .meaning = "Own key: threads of a rank's update on the host; 0: the processors that this process may use, "
                  "divided by the ranks on the host."},
      [](auto& c) -> auto& { return c.zero.offload_optimizer.threads; }));
}

void add_param(Keys& keys) {
  const std::string offload = kZero + "offload_param.";
  const auto section = [](auto& c) -> auto& { return c.zero.offload_param; };
  keys.push_back(bind<Config>(
      {.path = offload + "device",
       .allowed = choice(kDevices),
       .meaning = "Where parameter shards live: none, on the compute device; cpu, in host memory; nvme, on disk. "
                  "Only at stage 3."},
      [](auto& c) -> auto& { return c.zero.offload_param.device; }));
  keys.push_back(old_form("cpu_offload_param", "offload_param", section));
  keys.push_back(bind<Config>(
      {.path = offload + "pin_memory",
       .allowed = boolean(),
       .meaning = "Page-lock the host memory of parameters, as `offload_optimizer.pin_memory` (DeepSpeed: false)."},
      [](auto& c) -> auto& { return c.zero.offload_param.pin_memory; }));
  keys.push_back(nvme_path("offload_param", section));
  keys.push_back(bind<Config>(
      {.path = offload + "buffer_count",
       .allowed = integer(2, kMostBuffers),
       .meaning = "nvme: buffers in host memory between disk and compute device."},
      [](auto& c) -> auto& { return c.zero.offload_param.buffer_count; }));
  keys.push_back(bind<Config>(
      {.path = offload + "buffer_size",
       .allowed = integer(0),
       .meaning =
           "nvme: greatest number of elements of one of these buffers, each of which holds a unit's shard; 0: as "
           "many as the longest has (DeepSpeed: 1e8)."},
      [](auto& c) -> auto& { return c.zero.offload_param.buffer_size; }));
  keys.push_back(bind<Config>(
      {.path = offload + "max_in_cpu",
       .allowed = integer(0),
       .meaning = "nvme: greatest number of a rank's elements that stay in host memory instead, the first units'."},
      [](auto& c) -> auto& { return c.zero.offload_param.max_in_cpu; }));
}

void add_gradients(Keys& keys) {
  const auto section = [](auto& c) -> auto& { return c.zero.offload_gradients; };
  keys.push_back(bind<Config>(
      {.path = kZero + "offload_gradients.device",
       .allowed = choice(kGradientDevices),
       .meaning = "Own key: where the window's sums of gradients lie; cpu and nvme need offloaded optimizer "
                  "states. auto: cpu where `offload_optimizer.device` is cpu or nvme, else none."},
      [](auto& c) -> auto& { return c.zero.offload_gradients.device; }));
  keys.push_back(nvme_path("offload_gradients", section));
}

/// DeepSpeed's own default is 1e9, so larger values than the greatest chunk stand in many files.
Key<Config> sub_group_size() {
  Key<Config> key = bind<Config>(
      {.path = kZero + "sub_group_size",
       .allowed = integer(64),
       .meaning = "Greatest number of elements of one chunk of an update, 4194304 at most where states lie on NVMe; a "
                  "larger value means the default (DeepSpeed: 1e9)."},
      [](auto& c) -> auto& { return c.zero.sub_group_size; });
  key.read = [read = key.read](Config& config, const json& value, const std::string& path) {
    read(config, value, path);
    std::int64_t& size = config.zero.sub_group_size;
    if (size <= kMaxSubGroupSize) return;
    config.notices.push_back(path + " = " + std::to_string(size) + " means " + std::to_string(kMaxSubGroupSize) +
                             ", the greatest chunk");
    size = kMaxSubGroupSize;
  };
  return key;
}

}  // namespace

const Keys& offload_keys() {
  static const Keys keys = [] {
    Keys all;
    add_optimizer(all);
    add_param(all);
    add_gradients(all);
    all.push_back(sub_group_size());
    return all;
  }();
  return keys;
}

}  // namespace ballast::schema
