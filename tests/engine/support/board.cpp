#include "tests/engine/support/board.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iomanip>
#include <sstream>

#include "ballast/comm/communicator.h"

namespace ballast::testing {

namespace {

// Equal in every process of one program.
std::int64_t hash_of(const std::string& bytes) { return static_cast<std::int64_t>(std::hash<std::string>{}(bytes)); }

}  // namespace

std::string bytes_of(const at::Tensor& value) {
  const at::Tensor flat = value.detach().cpu().contiguous();
  return {static_cast<const char*>(flat.const_data_ptr()), flat.nbytes()};
}

std::string text_of(const StepReport& report) {
  std::ostringstream out;
  out << std::hexfloat << to_string(report.reason) << " applied " << report.applied << " norm " << report.grad_norm
      << " clip " << report.clip_factor << " scale " << report.loss_scale << " micro-batches " << report.micro_batches
      << " weight " << report.weight << " lr";
  for (double lr : report.lr) out << ' ' << lr;
  return out.str();
}

bool bit_equal(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && bytes_of(a) == bytes_of(b);
}

void Board::post(int rank, std::string label, const at::Tensor& value) {
  columns_[static_cast<std::size_t>(rank)].emplace_back(std::move(label), bytes_of(value));
}

void Board::post(int rank, std::string label, const StepReport& report) {
  columns_[static_cast<std::size_t>(rank)].emplace_back(std::move(label), text_of(report));
}

void Board::close(const World& world) {
  closed_ = true;
  const char* processes = std::getenv("WORLD_SIZE");  // as run_ranks decides it
  if (world.size() == 1 || processes == nullptr || std::atoi(processes) < 2) return;
  // Labels are the same text on all ranks or the test fails; of label and bytes a hash a piece is enough.
  const auto communicator = world.communicator("board", at::kCPU);
  const std::vector<Entry>& mine = columns_[static_cast<std::size_t>(world.rank())];
  const auto gather = [&](const at::Tensor& value) {
    const at::Tensor all = at::empty({world.size() * value.numel()}, value.options());
    communicator->all_gather(all, value, "board").wait();
    return all.view({world.size(), value.numel()});
  };
  const at::Tensor counts = gather(at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong));
  const at::Tensor hashes = at::zeros({2 * counts.max().item<std::int64_t>()}, at::kLong);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    hashes[2 * static_cast<std::int64_t>(i)] = hash_of(mine[i].first);
    hashes[2 * static_cast<std::int64_t>(i) + 1] = hash_of(mine[i].second);
  }
  const at::Tensor all = gather(hashes);
  for (int rank = 0; rank < world.size(); ++rank) {
    std::vector<Entry>& column = columns_[static_cast<std::size_t>(rank)];
    column.clear();
    for (std::int64_t i = 0; i < counts[rank][0].item<std::int64_t>(); ++i)
      column.emplace_back(std::to_string(all[rank][2 * i].item<std::int64_t>()),
                          std::to_string(all[rank][2 * i + 1].item<std::int64_t>()));
  }
}

void Board::expect_equal() const {
  if (!closed_) return;  // this number of ranks doesn't run here, and run_ranks has said so
  const std::vector<Entry>& first = columns_.front();
  EXPECT_FALSE(first.empty()) << "nothing was posted for comparison between ranks";
  for (std::size_t rank = 1; rank < columns_.size(); ++rank) {
    EXPECT_EQ(columns_[rank].size(), first.size()) << "rank " << rank << " posted another number of entries";
    for (std::size_t i = 0; i < std::min(first.size(), columns_[rank].size()); ++i) {
      EXPECT_EQ(columns_[rank][i].first, first[i].first) << "rank " << rank;
      EXPECT_TRUE(columns_[rank][i].second == first[i].second)
          << first[i].first << " differs between rank 0 and " << rank;
    }
  }
}

}  // namespace ballast::testing
