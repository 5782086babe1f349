// Saves behind the training, and saves that fail: at every call to the system, on one rank or on all, once or for good.

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/testing.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

const std::vector<Cell> kCells = cells(kEveryStage, kFp32, kManaged);

/// Holds up every write of checkpoints until it is opened.
class WriteGate {
 public:
  WriteGate()
      : faults_([this](FileOp op, const fs::path&) -> FileFault {
          if (op != FileOp::kWrite) return {};
          std::unique_lock lock(mutex_);
          opened_.wait(lock, [this] { return open_; });
          return fault_;
        }) {}
  ~WriteGate() { open({}); }
  void open(FileFault fault) {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
      fault_ = fault;
    }
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
  FileFault fault_;
  FileFaults faults_;
};

TEST(Asynchronous, SavesTheStateOfItsCallWhileTrainingGoesOn) {
  for (const Cell& cell : kCells) {
    WriteGate gate;
    run_trial(2, cell, [&](Trial& trial) {
      Session& session = trial.start(lin(300));
      session.window({pull(trial.shared(1))});
      session.engine().save_checkpoint(trial.folder(), "", {.asynchronous = true});
      for (int i = 0; i < 2; ++i) session.window({pull(trial.shared(1))});  // nothing is written yet
      session.expect_value("p", -.15);
      if (trial.rank() == 0) gate.open({});
      session.engine().synchronize();
      EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step1", "latest"}));
      Session& loaded = trial.start(lin(300, 7));
      loaded.engine().load_checkpoint(trial.folder());
      loaded.expect_value("p", -.05);
      loaded.expect_state("p", "exp_avg", .1);
      for (int i = 0; i < 2; ++i) loaded.window({pull(trial.shared(1))});
      loaded.expect_value("p", -.15);
    });
  }
}

TEST(Asynchronous, OneIsUnderWayAndTheEngineEndsBehindIt) {
  for (const Cell& cell : kCells)
    run_trial(2, cell, [&](Trial& trial) {
      Session& session = trial.start(lin(300));
      const SaveOptions options{.asynchronous = true, .keep_last = 2};
      for (int i = 0; i < 4; ++i) {
        session.engine().save_checkpoint(trial.folder(), "", options);  // waits for the one before
        session.window({pull(trial.shared(1))});
      }
      trial.forget_sessions();
      Session& loaded = trial.start(lin(300));
      EXPECT_EQ(loaded.engine().load_checkpoint(trial.folder()).tag, "global_step3");
      EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step2", "global_step3", "latest"}));
      loaded.expect_value("p", -.15);
    });
}

// As at the end of a script that doesn't say so: no rank meets another any more, and some end a little later.
TEST(Asynchronous, EnginesThatAreAbandonedTogetherLeaveTheCheckpoint) {
  for (const Cell& cell : kCells)
    run_trial(3, cell, [&](Trial& trial) {
      {
        Board unused(trial.world().size());
        Session session(lin(300), settings(trial.cell()), trial.world(), unused);
        session.window({pull(trial.shared(1))});
        session.engine().save_checkpoint(trial.folder(), "", {.asynchronous = true});
        std::this_thread::sleep_for(std::chrono::milliseconds(20 * trial.rank()));
        session.engine().abandon();
      }
      if (trial.rank() == 0) {
        EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step1", "latest"}));
      }
      trial.start(lin(300));
    });
}

TEST(Asynchronous, AnErrorComesWithTheNextCallOnAllRanksAndOnce) {
  using Call = std::function<void(Engine&, Trial&)>;
  const std::vector<std::pair<const char*, Call>> calls{
      {"step",
       [](Engine& engine, Trial&) {
         // A step that comes while the others still write goes through: some step tells.
         for (int i = 0; i < 10'000; ++i) {
           engine.step();
           std::this_thread::sleep_for(std::chrono::milliseconds(1));
         }
       }},
      {"synchronize", [](Engine& engine, Trial&) { engine.synchronize(); }},
      {"save", [](Engine& engine, Trial& trial) { engine.save_checkpoint(trial.folder(), "third"); }},
      {"load", [](Engine& engine, Trial& trial) { engine.load_checkpoint(trial.folder()); }},
      {"shutdown", [](Engine& engine, Trial&) { engine.shutdown(); }}};
  for (const auto& [name, call] : calls)
    for (const Cell& cell : cells(kEveryStage, kFp32, kManaged, {Placement::kHost})) {
      SCOPED_TRACE(name);
      const FileFaults faults([](FileOp op, const fs::path& path) -> FileFault {
        const bool its =
            path.parent_path().filename() == ".saving-second" && path.filename() == "rank-00001-of-00002.safetensors";
        return op == FileOp::kWrite && its ? FileFault{ENOSPC} : FileFault{};
      });
      run_trial(2, cell, [&](Trial& trial) {
        Session& session = trial.start(lin(300));
        Engine& engine = session.engine();
        engine.save_checkpoint(trial.folder(), "first");
        session.window({pull(trial.shared(1))});
        engine.save_checkpoint(trial.folder(), "second", {.asynchronous = true});
        std::string error;
        try {
          call(engine, trial);
        } catch (const IoError& e) {
          error = e.what();
        }
        for (const char* part : {"No space left", "rank-00001-of-00002", "rank 1", "free space"})
          EXPECT_NE(error.find(part), std::string::npos) << error;
        session.board().post(trial.rank(), error, at::zeros({1}));
        const bool over = std::string(name) == "shutdown";
        if (!over) session.meet_others();  // rank 0 has removed what was written
        if (!over || trial.rank() == 0) {
          EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"first", "latest"}));
        }
        if (over) {
          trial.forget_sessions();
          trial.start(lin(3));
          return;
        }
        session.window({pull(trial.shared(1))});  // said once
        session.expect_value("p", -.10);
        engine.save_checkpoint(trial.folder(), "fourth", {.asynchronous = true});
        engine.synchronize();
        EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"first", "fourth", "latest"}));
      });
    }
}

/// How the n-th call to the system goes wrong.
enum class End {
  kFails,      // it does, and that's all
  kStaysDead,  // from then on all do: a disk that is gone, or a process before its end
};

struct Trouble {
  End end;
  bool asynchronous;
  int rank;  // whose files it concerns; -1: anybody's
};

// One save with trouble at the n-th call. Returns whether there was an n-th call.
bool save_in_trouble(const Cell& cell, const Trouble& trouble, int n) {
  std::atomic<bool> reached{false}, armed{false};
  std::atomic<int> calls{0};
  const std::string its = "rank-0000" + std::to_string(trouble.rank);
  const FileFaults faults([&](FileOp op, const fs::path& path) -> FileFault {
    if (!armed || op == FileOp::kRead) return {};
    if (trouble.rank >= 0 && path.filename().string().find(its) == std::string::npos) return {};
    const int call = ++calls;
    if (call == n) reached = true;
    const bool wrong = call == n || (trouble.end == End::kStaysDead && call > n);
    return wrong ? FileFault{call % 2 == 0 ? EIO : ENOSPC} : FileFault{};
  });
  run_trial(2, cell, [&](Trial& trial) {
    Session& session = trial.start(lin(300));
    Engine& engine = session.engine();
    engine.save_checkpoint(trial.folder(), "global_step0");
    session.window({pull(trial.shared(1))});
    session.meet_others();
    armed = true;
    session.meet_others();
    std::string error;
    try {
      engine.save_checkpoint(trial.folder(), "global_step1", {.asynchronous = trouble.asynchronous, .keep_last = 1});
      engine.synchronize();
    } catch (const IoError& e) {
      error = e.what();
    }
    session.board().post(trial.rank(), "error: " + error, at::zeros({1}));  // everybody's
    session.meet_others();
    armed = false;
    session.meet_others();
    {
      Session& loaded = trial.start(lin(300, 7));
      const std::string tag = loaded.engine().load_checkpoint(trial.folder()).tag;
      EXPECT_TRUE(tag == "global_step1" || (tag == "global_step0" && !error.empty())) << tag << " behind " << error;
      loaded.expect_value("p", tag == "global_step1" ? -.05 : 0);
    }
    session.window({pull(trial.shared(1))});
    session.expect_value("p", -.10);
    engine.save_checkpoint(trial.folder(), "global_step2", {.keep_last = 1});
    EXPECT_EQ(trial.folder().names(), (std::vector<std::string>{"global_step2", "latest"}));
  });
  return reached;
}

class Faults : public ::testing::TestWithParam<Trouble> {};

TEST_P(Faults, LeaveThePreviousCheckpointAndTheEngine) {
  set_log_sink([](LogLevel, const std::string&) {});  // of leftovers that couldn't be removed
  std::size_t cell = 0;                               // all of them in turn: what the system sees is alike
  int n = 1;
  while (save_in_trouble(kCells[cell++ % kCells.size()], GetParam(), n)) ++n;
  set_log_sink({});
  EXPECT_GT(n, GetParam().rank < 0 ? 20 : 5);
}

std::vector<Trouble> troubles() {
  std::vector<Trouble> all;
  for (const End end : {End::kFails, End::kStaysDead})
    for (const bool asynchronous : {false, true})
      for (const int rank : {-1, 0, 1}) all.push_back({end, asynchronous, rank});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Troubles, Faults, ::testing::ValuesIn(troubles()),
                         [](const ::testing::TestParamInfo<Trouble>& info) {
                           const Trouble& t = info.param;
                           return std::string(t.end == End::kFails ? "OneCall" : "AllFromOneCall") +
                                  (t.asynchronous ? "Asynchronous" : "Synchronous") +
                                  (t.rank < 0 ? "" : "OfRank" + std::to_string(t.rank));
                         });

}  // namespace
}  // namespace ballast::testing
