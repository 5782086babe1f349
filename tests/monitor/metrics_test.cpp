#include "ballast/monitor/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>

#include "ballast/base/error.h"
#include "ballast/base/remove_tree.h"
#include "ballast/monitor/breakdown.h"

namespace ballast::monitor {
namespace {

const std::string kElsewhere = "; free space there, or choose another folder, in a run file train.folder)";

class MetricsFilesTest : public testing::Test {
 protected:
  MetricsFilesTest() {
    std::string name = (std::filesystem::temp_directory_path() / "ballast-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~MetricsFilesTest() override { remove_tree(folder_); }
  static std::string content(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  std::filesystem::path folder_;
};

TEST_F(MetricsFilesTest, EveryRowIsInBothFilesAtOnce) {
  MetricsFiles files(folder_ / "runs/a", {"step", "loss", "held_out"});
  EXPECT_EQ(content(files.csv()), "step,loss,held_out\n");
  files.write({1, 0.1, std::nullopt});
  files.write({2, std::nan(""), 3.25});
  files.write({1e15, -std::numeric_limits<double>::infinity(), 1.0 / 3});
  EXPECT_EQ(content(files.csv()), "step,loss,held_out\n1,0.1,\n2,,3.25\n1e+15,,0.3333333333333333\n");
  EXPECT_EQ(content(files.jsonl()),
            "{\"step\": 1, \"loss\": 0.1}\n{\"step\": 2, \"loss\": null, \"held_out\": 3.25}\n"
            "{\"step\": 1e+15, \"loss\": null, \"held_out\": 0.3333333333333333}\n");
  EXPECT_THROW(files.write({1}), UseError);
}

TEST_F(MetricsFilesTest, AnEarlierRunIsReplaced) {
  MetricsFiles(folder_, {"a"}).write({1});
  MetricsFiles second(folder_, {"b"});
  EXPECT_EQ(content(second.csv()), "b\n");
  EXPECT_EQ(content(second.jsonl()), "");
}

TEST_F(MetricsFilesTest, ARunThatGoesOnKeepsItsRowsUpToThere) {
  {
    MetricsFiles first(folder_, {"step", "loss"});
    for (int step = 1; step <= 12; ++step) first.write({step, 0.1 * step});
    EXPECT_EQ(first.rows_kept(), 0);
  }
  std::ofstream(folder_ / "metrics.csv", std::ios::app) << "2";  // the run was killed in the middle of a line
  std::ofstream(folder_ / "metrics.jsonl", std::ios::app) << "{\"step\": 2";
  MetricsFiles second(folder_, {"step", "loss"}, MetricsPoint{2, "loss", 0.2});
  EXPECT_EQ(second.rows_kept(), 2);
  EXPECT_EQ(second.rows_cut(), 10);
  EXPECT_FALSE(second.put_aside());
  second.write({3, 7});
  EXPECT_EQ(content(second.csv()), "step,loss\n1,0.1\n2,0.2\n3,7\n");
  EXPECT_EQ(content(second.jsonl()),
            "{\"step\": 1, \"loss\": 0.1}\n{\"step\": 2, \"loss\": 0.2}\n{\"step\": 3, \"loss\": 7}\n");
  const MetricsFiles fresh(folder_ / "new", {"step"}, MetricsPoint{5, "step", 5});
  EXPECT_EQ(content(fresh.csv()), "step\n");
  EXPECT_FALSE(fresh.put_aside());
}

TEST_F(MetricsFilesTest, RowsThatDontLeadToThePointArePutAside) {
  const auto earlier = [&](const std::vector<double>& steps) {
    MetricsFiles files(folder_, {"step", "loss"});
    for (const double step : steps) files.write({step, 0.5 * step});
  };
  const auto expect_aside = [&](const std::vector<double>& steps, const MetricsPoint& point,
                                const std::vector<std::string>& columns) {
    earlier(steps);
    const std::string csv = content(folder_ / "metrics.csv"), jsonl = content(folder_ / "metrics.jsonl");
    const MetricsFiles files(folder_, columns, point);
    EXPECT_TRUE(files.put_aside());
    EXPECT_EQ(files.rows_kept(), 0);
    EXPECT_EQ(content(files.csv()), "step," + columns[1] + "\n");
    EXPECT_EQ(content(files.jsonl()), "");
    EXPECT_EQ(content(folder_ / "metrics.csv.old"), csv);
    EXPECT_EQ(content(folder_ / "metrics.jsonl.old"), jsonl);
  };
  expect_aside({1, 2, 3}, {2, "loss", 0.75}, {"step", "loss"});  // another run's
  expect_aside({1, 2, 3}, {4, "loss", 2}, {"step", "loss"});     // they end before
  expect_aside({1, 3, 4}, {3, "loss", 1.5}, {"step", "loss"});   // a gap
  expect_aside({5, 6}, {3, "loss", 1.5}, {"step", "loss"});      // they begin behind
  expect_aside({1, 2, 3}, {2, "other", 1}, {"step", "other"});
}

TEST_F(MetricsFilesTest, ErrorsNamePathAndReason) {
  std::ofstream(folder_ / "file") << "x";
  try {
    MetricsFiles(folder_ / "file/run", {"a"});
    FAIL() << "a folder inside a file was created";
  } catch (const IoError& e) {
    EXPECT_EQ(std::string(e.what()), "[monitor.create] can't create the folder (" + (folder_ / "file/run").string() +
                                         ": Not a directory" + kElsewhere);
  }
  std::filesystem::create_directories(folder_ / "taken/metrics.csv");
  try {
    MetricsFiles(folder_ / "taken", {"a"});
    FAIL() << "a folder was opened as a file";
  } catch (const IoError& e) {
    EXPECT_EQ(std::string(e.what()), "[monitor.create] can't write the file (" +
                                         (folder_ / "taken/metrics.csv").string() + ": Is a directory" + kElsewhere);
  }
}

TEST_F(MetricsFilesTest, AFullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  std::filesystem::create_symlink("/dev/full", folder_ / "metrics.csv");
  try {
    MetricsFiles(folder_, {"a"});
    FAIL() << "the header was written to a full disk";
  } catch (const IoError& e) {
    EXPECT_EQ(std::string(e.what()), "[monitor.write] can't write the file (" + (folder_ / "metrics.csv").string() +
                                         ": No space left on device" + kElsewhere);
  }
}

TEST(Breakdown, CountsEachPhaseAndWaitsAtBothEnds) {
  int waits = 0;
  Breakdown breakdown({"forward", "step"}, [&] { ++waits; });
  const auto spin = [](double seconds) {
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    }
  };
  for (int i = 0; i < 2; ++i) {
    Breakdown::Timer timer(&breakdown, 0);
    Breakdown::Timer nothing(nullptr, 1);
    spin(0.01);
  }
  EXPECT_EQ(waits, 4);
  const auto first = breakdown.take();
  EXPECT_GE(first[0], 0.02);
  EXPECT_EQ(first[1], 0);
  EXPECT_EQ(breakdown.take(), (std::vector<double>{0, 0}));
  EXPECT_NE(breakdown.summary().find("s (100%), step 0.0 s (0%)"), std::string::npos) << breakdown.summary();
}

}  // namespace
}  // namespace ballast::monitor
