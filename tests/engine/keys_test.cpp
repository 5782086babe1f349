// Keys whose effect shows in numbers that the cases and grids don't look at.

#include "ballast/base/ledger.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

constexpr double kFine = 1 + 0x1p-10;  // fp16 holds it, bf16 rounds it to 1

TEST(CommunicationDataType, RoundsGradientsOfOneBackwardAndNoSums) {
  for (const Cell& cell : cells(kEveryStage, kFp32, {false}))
    run_trial(2, cell, [](Trial& trial) {
      const double sent_alone[] = {kFine, kFine, 1};
      int i = 0;
      for (const char* type : {"fp32", "fp16", "bf16"}) {
        const double alone = sent_alone[i++];
        Session& session = trial.start(lin(4), 1, {{"communication_data_type", type}});
        EXPECT_EQ(session.window({pull(kFine)}).grad_norm, 2 * alone) << type;
        // Below stage 2 the two are added up before they travel, in fp32.
        const double each = trial.cell().stage < 2 ? kFine : alone;
        EXPECT_EQ(session.window({pull(kFine), pull(kFine)}).grad_norm, 2 * 2 * each) << type;
      }
    });
}

TEST(PersistenceThresholds, SayHowManySmallUnitsStayGathered) {
  struct Limits {
    std::int64_t unit, model;
    int kept;
  };
  for (const Limits& limits : {Limits{99, 1000, 0}, Limits{100, 1000, 3}, Limits{100, 299, 2}, Limits{100, 99, 0}})
    for (const Placement placement : kEveryPlacement)
      run_trial(2, {3, placement, DType::kFloat32, false}, [&](Trial& trial) {
        Session& session = trial.start(lin({{"a.p", {100}}, {"b.p", {100}}, {"c.p", {100}}}), 1,
                                       {{"zero_optimization",
                                         {{"stage3_param_persistence_threshold", limits.unit},
                                          {"stage3_model_persistence_threshold", limits.model}}}});
        for (int window = 1; window <= 2; ++window) {
          session.window({{{"a.p", 1}, {"b.p", 1}, {"c.p", 1}}});
          session.engine().synchronize();
          const std::int64_t unit = 128 * 4;  // padded to 64 elements a rank
          EXPECT_EQ(session.engine().memory().cell(MemoryKind::kGathered, Tier::kDevice).now, limits.kept * unit)
              << limits.unit << ", " << limits.model << ", window " << window;
          for (const char* name : {"a.p", "b.p", "c.p"}) session.expect_value(name, -.05 * window);
        }
      });
}

}  // namespace
}  // namespace ballast::testing
