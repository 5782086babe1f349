#include "tests/engine/support/homes.h"

namespace ballast::testing {

const std::vector<Home>& homes() {
  using Json = nlohmann::json;
  const Json half = {{"offload_optimizer", {{"ratio", 0.5}}}},
             sums_stay = {{"offload_gradients", {{"device", "none"}}}};
  static const std::vector<Home> all{
      {"device", Placement::kDevice, Json::object()}, {"host", Placement::kHost, Json::object()},
      {"nvme", Placement::kNvme, Json::object()},     {"half on host", Placement::kHost, half},
      {"half on nvme", Placement::kNvme, half},       {"host, sums on the device", Placement::kHost, sums_stay},
  };
  return all;
}

}  // namespace ballast::testing
