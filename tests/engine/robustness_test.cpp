// What callers do that a tidy example doesn't: guards that outlive their engine, steps inside gathered(), backwards
// that break at different places on different ranks, parameters read after the engine failed.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ballast/base/error.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

void in_every_stage(const std::function<void(Trial&)>& body) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned)) run_trial(2, cell, body);
}

TEST(Guards, EndNothingAfterTheirEngine) {
  in_every_stage([](Trial& trial) {
    auto model = lin(4, 1);
    Session& session = trial.start(model);
    {
      auto local = session.engine().no_sync();
      const auto coalesced = session.engine().coalesce_grad_reduction();
      const auto gathered = session.engine().gathered({}, 0);
      session.engine().shutdown();
      EXPECT_NO_THROW(local.end());
    }
    expect_all(model->parameter("p"), 1, 0, "the module's p");
    trial.forget_sessions();
    trial.start(lin(1));
  });
}

}  // namespace
}  // namespace ballast::testing
