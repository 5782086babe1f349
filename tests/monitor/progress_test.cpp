#include "ballast/monitor/progress.h"

#include <gtest/gtest.h>

#include <memory>

#include "ballast/base/log.h"

namespace ballast::monitor {
namespace {

class ProgressTest : public testing::Test {
 protected:
  std::string written() {
    std::fflush(file_);
    std::rewind(file_);
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file_));
    return text;
  }
  std::FILE* file_ = std::tmpfile();
  ~ProgressTest() override { std::fclose(file_); }
};

TEST_F(ProgressTest, APipeGetsMilestonesAsPlainLines) {
  {
    Progress progress(file_, /*terminal=*/false);
    progress.report(0.1, "step 1", false);
    progress.report(0.2, "step 2", true);
    progress.line("held-out 3.00");
    log_warning("a peer is slow");
  }
  EXPECT_EQ(written(), "step 2\nheld-out 3.00\nwarning: a peer is slow\n");
}

TEST_F(ProgressTest, ATerminalGetsABarAndLinesAboveIt) {
  {
    Progress progress(file_, /*terminal=*/true);
    progress.report(0.5, "step 5", false);
    log_info("note");
    progress.report(1, "step 10", false);  // within the redraw interval: shown at the end
    progress.end();
    progress.line("done");
  }
  const std::string half = "\r\x1b[K[########........]  50% step 5";
  const std::string all = "\r\x1b[K[################] 100% step 10";
  EXPECT_EQ(written(), half + "\r\x1b[Knote\n" + half + all + "\ndone\n");
}

TEST_F(ProgressTest, ALongTextIsCutToTheTerminal) {
  { Progress(file_, true).report(0, std::string(200, 'x'), false); }
  const std::string text = written();
  EXPECT_EQ(text.size(), 2 * (4 + 79) + 1) << text;  // drawn twice (now and at the end), 80 columns, a line end
}

TEST_F(ProgressTest, LogLinesReturnToStandardError) {
  { Progress progress(file_, false); }
  testing::internal::CaptureStderr();
  log_info("after");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "ballast: after\n");
  EXPECT_EQ(written(), "");
}

TEST(Duration, TwoUnitsThatMatter) {
  EXPECT_EQ(format_duration(-1), "0 s");
  EXPECT_EQ(format_duration(59.4), "59 s");
  EXPECT_EQ(format_duration(59.6), "1 min 00 s");
  EXPECT_EQ(format_duration(3725), "1 h 02 min");
  EXPECT_EQ(format_duration(90000), "1 d 01 h");
}

}  // namespace
}  // namespace ballast::monitor
