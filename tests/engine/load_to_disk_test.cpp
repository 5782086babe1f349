// A load of states on disk goes to a second swap file, which takes the first one's place when all ranks have theirs.
#include <sys/mount.h>
#include <torch/torch.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/data/temporary_folder.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/rank_with_faulty_disk.h"
#include "tests/engine/support/swap_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

using tiers::DiskOp;
using tiers::DiskRequest;
using tiers::Fault;

/// An engine with states on disk, trained for some steps. optimizer: to merge into "offload_optimizer".
struct Trained {
  Trained(const World& world, const Cell& cell, const nlohmann::json& optimizer = nlohmann::json::object())
      : world(world), unused(world.size()) {
    nlohmann::json changes = Zoo::leaf_settings();
    changes["comm_timeout_seconds"] = 30;
    changes["zero_optimization"]["offload_optimizer"] = optimizer;
    session = std::make_unique<Session>(model, settings(cell, 1, changes), world, unused);
  }
  void train(int steps) {
    for (int n = 0; n < steps; ++n, ++step) {
      session->engine().backward(model->loss(sample(step, 0, world.rank(), world.device())));
      session->engine().step();
    }
    session->engine().synchronize();
  }
  std::map<std::string, at::Tensor> states() {
    std::map<std::string, at::Tensor> states = session->masters();
    for (const auto& [name, master] : session->masters())
      states[name + ", exp_avg"] = session->engine().full_optimizer_state(name, "exp_avg");
    return states;
  }

  World world;
  Board unused;
  std::shared_ptr<Zoo> model = std::make_shared<Zoo>();
  std::unique_ptr<Session> session;
  int step = 0;
};

void expect_equal(const std::map<std::string, at::Tensor>& got, const std::map<std::string, at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, value] : want) EXPECT_TRUE(bit_equal(got.at(name), value)) << name;
}

TEST(LoadToDisk, ThatCannotBeWrittenChangesNothingAnywhere) {
  for (const Cell& cell : {Cell{1, Placement::kNvme}, Cell{3, Placement::kAllNvme}}) {
    std::atomic<bool> broken{false};
    const RankWithFaultyDisk faulty(0, "optimizer.swap", [&](const DiskRequest& request) {
      return broken && request.op == DiskOp::kWrite ? Fault::error(EIO) : Fault::none();
    });
    const data::TemporaryFolder folder;
    run_ranks(
        2,
        [&](const World& world) {
          Trained trained(world, cell);
          Engine& engine = trained.session->engine();
          trained.train(2);
          const auto saved = trained.states();
          engine.save_checkpoint(folder.path(), "t");
          trained.train(2);
          const auto before = trained.states();
          if (world.rank() == 0) broken = true;
          try {
            engine.load_checkpoint(folder.path(), "t");
            ADD_FAILURE() << "loaded";
          } catch (const IoError& e) {
            for (const char* part : {"Input/output error", "optimizer.swap", "rank 0"})
              EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << part << " in: " << e.what();
          }
          if (world.rank() == 0) broken = false;
          expect_equal(trained.states(), before);
          engine.load_checkpoint(folder.path(), "t");
          expect_equal(trained.states(), saved);
          trained.train(1);
        },
        thread_options());
    expect_nothing_swapped();
  }
}

// However many chunks are filled at a time, and with units whose states lie on the device.
TEST(LoadToDisk, ComesThroughARingOfAnyLength) {
  const data::TemporaryFolder folder;
  for (const int buffers : {2, 3, 4, 7, 1024})
    for (const double ratio : {1.0, 0.5}) {
      run_ranks(
          2,
          [&](const World& world) {
            const nlohmann::json optimizer = {
                {"buffer_count", buffers}, {"ratio", ratio}, {"pipeline_write", buffers != 3}};
            Trained trained(world, {buffers == 7 ? 3 : 1, Placement::kNvme}, optimizer);
            trained.train(2);
            const auto saved = trained.states();
            trained.session->engine().save_checkpoint(folder.path(), "t");
            trained.train(2);
            const std::string other = std::to_string(buffers) + std::to_string(ratio);
            const auto later = trained.states();
            trained.session->engine().save_checkpoint(folder.path(), other);
            for (const auto& [tag, want] : {std::pair("t", saved), std::pair(other.c_str(), later)}) {
              trained.session->engine().load_checkpoint(folder.path(), tag);
              expect_equal(trained.states(), want);
            }
          },
          thread_options());
    }
  expect_nothing_swapped();
}

/// A small file system in memory, which only root can mount.
class SmallDisk {
 public:
  explicit SmallDisk(const char* size)
      : is_there_(::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, (std::string("size=") + size).c_str()) == 0) {}
  ~SmallDisk() {
    if (is_there_) ::umount(folder_.path().c_str());
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  bool is_there() const { return is_there_; }
  std::string path() const { return folder_.path().string(); }
  /// Takes all that is free.
  void fill() const {
    std::ofstream filler(folder_.path() / "filler");
    const std::vector<char> block(4096);
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }

 private:
  const data::TemporaryFolder folder_;
  const bool is_there_;
};

TEST(LoadToDisk, GoesThroughMemoryWhereASecondFileHasNoRoom) {
  const SmallDisk disk("8m");
  if (!disk.is_there()) GTEST_SKIP() << "mounting a small tmpfs: " << std::strerror(errno);
  const data::TemporaryFolder folder;
  run_ranks(
      2,
      [&](const World& world) {
        Trained trained(world, {2, Placement::kNvme}, {{"nvme_path", disk.path()}});
        trained.train(2);
        const auto saved = trained.states();
        trained.session->engine().save_checkpoint(folder.path(), "t");
        trained.train(2);
        if (world.rank() == 0) disk.fill();
        trained.session->engine().load_checkpoint(folder.path(), "t");
        expect_equal(trained.states(), saved);
        trained.train(1);
      },
      thread_options());
}

}  // namespace
}  // namespace ballast::testing
