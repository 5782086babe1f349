#include "tests/engine/support/homes.h"

#include "tests/engine/support/swap_folder.h"

namespace ballast::testing {

const std::vector<Home>& homes() {
  using Json = nlohmann::json;
  const Json half = {{"offload_optimizer", {{"ratio", 0.5}}}},
             sums_stay = {{"offload_gradients", {{"device", "none"}}}},
             sums_on_disk = {{"offload_gradients", {{"device", "nvme"}, {"nvme_path", swap_folder().string()}}}};
  static const std::vector<Home> all{
      {"device", Placement::kDevice, Json::object()},
      {"host", Placement::kHost, Json::object()},
      {"nvme", Placement::kNvme, Json::object()},
      {"half on host", Placement::kHost, half},
      {"half on nvme", Placement::kNvme, half},
      {"host, sums on the device", Placement::kHost, sums_stay},
      {"host, sums on nvme", Placement::kHost, sums_on_disk},
      {"all on nvme", Placement::kAllNvme, Json::object()},
  };
  return all;
}

}  // namespace ballast::testing
