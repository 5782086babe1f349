#include "ballast/comm/collective_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>

namespace ballast {
namespace {

/// A collective on a device, played by the test.
class PlayedFlight final : public Flight {
 public:
  enum class State { kRunning, kEnded, kFailed };
  explicit PlayedFlight(std::shared_ptr<std::atomic<State>> state) : state_(std::move(state)) {}
  void wait(std::chrono::milliseconds) override {}
  bool blocks_host() const noexcept override { return false; }
  bool finished() override {
    if (*state_ == State::kFailed) throw std::runtime_error("link down\nbacktrace");
    return *state_ == State::kEnded;
  }

 private:
  std::shared_ptr<std::atomic<State>> state_;
};

struct Watched {
  using State = PlayedFlight::State;
  explicit Watched(std::chrono::milliseconds timeout)
      : watch(log, timeout, [this](std::uint64_t sequence, const std::string& cause) {
          reported.set_value(std::to_string(sequence) + " " + cause);
        }) {}

  std::shared_ptr<std::atomic<State>> launch(const std::string& what) {
    auto state = std::make_shared<std::atomic<State>>(State::kRunning);
    watch.follow(log.launched("all_gather", what, 8), std::make_unique<PlayedFlight>(state));
    return state;
  }

  CollectiveLog log;
  std::promise<std::string> reported;
  CollectiveWatch watch;
};

TEST(CollectiveWatch, TellsWhichCollectiveDidNotEndInTime) {
  Watched test(std::chrono::milliseconds(200));
  *test.launch("unit a") = Watched::State::kEnded;
  test.launch("unit b");
  test.launch("unit c");
  EXPECT_EQ(test.reported.get_future().get(), "2 not ended after 200 ms");
  EXPECT_EQ(test.log.text(),
            "#1 all_gather unit a 8 B done, #2 all_gather unit b 8 B failed, #3 all_gather unit c 8 B in flight");
}

TEST(CollectiveWatch, TellsAFailureBeforeTheTimeout) {
  Watched test(std::chrono::minutes(10));
  *test.launch("unit a") = Watched::State::kFailed;
  EXPECT_EQ(test.reported.get_future().get(), "1 link down");
}

TEST(CollectiveWatch, EndsWithCollectivesUnderWay) {
  Watched test(std::chrono::minutes(10));
  const auto first = test.launch("unit a");
  test.launch("unit b");
  *first = Watched::State::kEnded;
}  // would hang here

TEST(CollectiveLog, KeepsTheLastSixteen) {
  CollectiveLog log;
  for (int i = 1; i <= 20; ++i)
    EXPECT_EQ(log.launched("broadcast", "unit " + std::to_string(i), i), static_cast<std::uint64_t>(i));
  log.ended(3, CollectiveLog::State::kDone);  // overwritten by 19, which it must not touch
  log.ended(20, CollectiveLog::State::kDone);
  const std::string text = log.text();
  EXPECT_EQ(text.find("#5 broadcast unit 5 5 B in flight, #6 "), 0u);
  EXPECT_NE(text.find("#19 broadcast unit 19 19 B in flight, #20 broadcast unit 20 20 B done"), std::string::npos);
  EXPECT_EQ(CollectiveLog().text(), "");
}

}  // namespace
}  // namespace ballast
