#include "ballast/base/error.h"

#include <gtest/gtest.h>

#include "ballast/base/log.h"

namespace ballast {
namespace {

TEST(Error, TextNamesOperationWhatAndBothValues) {
  try {
    check_eq<IoError>("tiers.finish", "short read", 3, 4, "bytes; chunk ", 17);
    FAIL() << "3 == 4 passed";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[tiers.finish] short read (got 3, want 4 bytes; chunk 17)");
  }
  try {
    check_eq<IoError>("tiers.finish", "short read", 3, 4);
    FAIL() << "3 == 4 passed";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[tiers.finish] short read (got 3, want 4)");
  }
  EXPECT_NO_THROW(check_eq<IoError>("tiers.finish", "short read", 4, 4));
}

TEST(Log, SinkReceivesWholeLines) {
  std::string seen;
  set_log_sink(
      [&](LogLevel level, const std::string& line) { seen += (level == LogLevel::kWarning ? "W " : "I ") + line; });
  log_warning("rank ", 3, " is late");
  set_log_sink(nullptr);
  EXPECT_EQ(seen, "W rank 3 is late");
}

}  // namespace
}  // namespace ballast
