#include "ballast/base/process_mark.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace ballast {
namespace {

int status_of_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

TEST(ProcessMark, IsHereInTheProcessThatMadeItAlone) {
  const ProcessMark mark;
  EXPECT_TRUE(mark.is_here());
  EXPECT_EQ(status_of_child([&] { return mark.is_here() ? 1 : 0; }), 0);
  EXPECT_TRUE(mark.is_here());
}

TEST(ProcessMark, TellsAChildFromItsOwnChild) {
  EXPECT_EQ(status_of_child([] {
              const ProcessMark mark;
              if (!mark.is_here()) return 1;
              return status_of_child([&] { return mark.is_here() ? 2 : 0; });
            }),
            0);
}

}  // namespace
}  // namespace ballast
