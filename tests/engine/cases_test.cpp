// Faults reported by users of engines of this kind, by number: every case runs in every cell that it names.

#include "tests/engine/support/cases.h"

#include <iomanip>
#include <map>
#include <set>
#include <sstream>

namespace ballast::testing {
namespace {

class CaseTest : public ::testing::Test {
 public:
  CaseTest(Case the_case, Cell cell) : case_(std::move(the_case)), cell_(cell) {}
  void TestBody() override { run_trial(case_.world, cell_, case_.run); }

 private:
  Case case_;
  Cell cell_;
};

// "Cases/Case09.EpochEndsInsideAWindow/stage2_host_fp32_managed"
bool register_cases(const std::vector<Case>& table) {
  for (const Case& entry : table)
    for (const Cell& cell : cells(entry.stages, entry.dtypes, entry.managed, entry.placements)) {
      std::ostringstream suite;
      suite << "Cases/Case" << std::setw(2) << std::setfill('0') << entry.number;
      ::testing::RegisterTest(suite.str().c_str(), (std::string(entry.name) + '/' + name_of(cell)).c_str(), nullptr,
                              nullptr, __FILE__, __LINE__,
                              [entry, cell]() -> CaseTest* { return new CaseTest(entry, cell); });
    }
  return true;
}

[[maybe_unused]] const bool registered = register_cases(window_cases()) && register_cases(call_cases()) &&
                                         register_cases(scaling_cases()) && register_cases(state_cases()) &&
                                         register_cases(order_cases()) && register_cases(checkpoint_cases());

// A case may name fewer cells than there are, but no placement may be missing where it runs at all.
TEST(Table, EveryNumberRunsInEveryPlacement) {
  std::map<std::pair<int, int>, std::set<Placement>> seen;  // by number and stage
  for (const auto& table :
       {window_cases(), call_cases(), scaling_cases(), state_cases(), order_cases(), checkpoint_cases()})
    for (const Case& entry : table)
      for (const int stage : entry.stages)
        seen[{entry.number, stage}].insert(entry.placements.begin(), entry.placements.end());
  for (const auto& [where, placements] : seen)
    EXPECT_EQ(placements.size(), kEveryPlacement.size()) << "case " << where.first << " in stage " << where.second;
}

}  // namespace
}  // namespace ballast::testing
