#pragma once

#include <functional>
#include <vector>

#include "tests/engine/support/plain_optimizer.h"
#include "tests/engine/support/trial.h"

namespace ballast::testing {

inline const std::vector<int> kEveryStage{0, 1, 2, 3};
inline const std::vector<DType> kFp32{DType::kFloat32}, kFp16{DType::kFloat16},
    kHalves{DType::kBFloat16, DType::kFloat16}, kEveryDType{DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline const std::vector<bool> kManaged{true}, kCallerOwned{false}, kBothWindows{true, false};

/// A fault that users of engines of this kind have reported, as a small run whose right answer is known. It must hold
/// in every stage, dtype and kind of window named, with states on the device, on the host and on NVMe.
struct Case {
  int number;
  const char* name;
  std::function<void(Trial&)> run;
  std::vector<bool> managed = kBothWindows;
  std::vector<DType> dtypes = kFp32;
  std::vector<int> stages = kEveryStage;
  int world = 2;
  std::vector<Placement> placements = kEveryPlacement;
};

/// Parameters that are empty, zero-dimensional and tiny, each with a gradient of 1 in `all`, whose norm is kNorm. unit:
/// "": all in one unit; ".p": each in its own.
struct EveryShape {
  static constexpr double kNorm = 4.898979;  // of 24 elements
  EveryShape(Trial& trial, const std::string& unit) {
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{0}, {0, 8}, {1}, {}, {7}, {3, 5}}) {
      parameters.push_back({"p" + std::to_string(parameters.size()) + unit, shape});
      all.emplace_back(parameters.back().name, trial.shared(1));
    }
  }
  std::vector<Named> parameters;
  Pull all;
};

/// The table, by file.
std::vector<Case> window_cases();      // what a window sums
std::vector<Case> call_cases();        // orders of calls
std::vector<Case> scaling_cases();     // non-finite values, loss scale, clipping
std::vector<Case> state_cases();       // shapes, groups, ties, life of an engine
std::vector<Case> order_cases();       // orders of use, divergence, overlap
std::vector<Case> checkpoint_cases();  // what was saved and taken up again

}  // namespace ballast::testing
