// What disks do wrong: what passes is resumed, all else is an error that names file, chunk, bytes, rank and remedy, and
// no wrong value is ever handed out.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/tiers/swap_file.h"
#include "tests/tiers/aligned.h"
#include "tests/tiers/faulty_disk.h"
#include "tests/tiers/places.h"

namespace ballast::tiers {
namespace {

constexpr std::int64_t kChunk = 1 << 18, kBlock = 1 << 16;

class Faults : public AtPlace {
 protected:
  /// Writes two chunks and reads them back under the plan; true where every byte came back.
  bool round_trip(const Plan& plan, std::int64_t block = kBlock) {
    const FaultyDisks faulty(plan);
    SwapFile file(this->file(), {kChunk, kChunk}, options(block), 1);
    const Aligned a(kChunk, 1), b(kChunk, 2), read_a(kChunk, 3), read_b(kChunk, 4);
    file.start_write(0, a.span());
    file.start_write(1, b.span());
    file.start_read(1, read_b.span());
    file.start_read(0, read_a.span());
    file.finish_all();
    return a == read_a && b == read_b;
  }
  std::string error_of(const Plan& plan) {
    return data::error_text<IoError>(*folder_, [&] { round_trip(plan); });
  }
};

TEST_P(Faults, ShortTransfersAreResumed) {
  int count = 0;
  EXPECT_TRUE(round_trip([&](const DiskRequest&) {
    return ++count % 2 == 1 ? Fault::moves_only(kDiskAlign * (1 + count % 5)) : Fault::none();
  }));
  EXPECT_GT(count, 16) << "4 requests a chunk, each way, would have sufficed without faults";
  // Ends between two sectors, which O_DIRECT can't resume there, and moves nothing at first.
  EXPECT_TRUE(round_trip([&](const DiskRequest& r) {
    return ++count % 3 == 0 && r.bytes > kDiskAlign ? Fault::moves_only(2 * kDiskAlign) : Fault::none();
  }));
  EXPECT_TRUE(round_trip([&](const DiskRequest&) { return ++count % 3 == 0 ? Fault::moves_only(0) : Fault::none(); }));
}

TEST_P(Faults, InterruptedTransfersAreResumed) {
  for (const int error : {EINTR, EAGAIN}) {
    int count = 0;
    EXPECT_TRUE(round_trip([&](const DiskRequest&) { return ++count % 4 ? Fault::error(error) : Fault::none(); }));
    EXPECT_EQ(count, 64) << "each of 16 requests three times in vain";
  }
}

TEST_P(Faults, WhatIsInterruptedForeverIsAnError) {
  const std::string error = error_of([](const DiskRequest&) { return Fault::error(EINTR); });
  EXPECT_EQ(
      error,
      "[tiers.write] Interrupted system call (DIR/swap.0, chunk 0 at byte 0, failed at byte 0; got 0, want 262144 "
      "bytes; rank 1; mend its cause or choose another nvme_path)");
}

TEST_P(Faults, AReadErrorNamesWhatAndWhere) {
  EXPECT_EQ(error_of([](const DiskRequest& r) {
              return r.op == DiskOp::kRead && r.offset == kChunk + 2 * kBlock ? Fault::error(EIO) : Fault::none();
            }).substr(0, 96),
            "[tiers.read] Input/output error (DIR/swap.0, chunk 1 at byte 262144, failed at byte 393216; got ");
}

TEST_P(Faults, AFullDiskIsAnErrorAlsoWhereItShowsAsAShortWriteFirst) {
  bool was_short = false;
  const std::string error = error_of([&](const DiskRequest& r) {
    if (r.op != DiskOp::kWrite || r.offset < kChunk) return Fault::none();
    if (std::exchange(was_short, true)) return Fault::error(ENOSPC);
    return Fault::moves_only(kDiskAlign);
  });
  EXPECT_TRUE(error.starts_with("[tiers.write] No space left on device (DIR/swap.0, chunk 1 at byte 262144, failed at"))
      << error;
  EXPECT_TRUE(error.ends_with("want 262144 bytes; rank 1; free space there or choose another nvme_path)")) << error;
}

TEST_P(Faults, AFailedFileThrowsItsCauseFromEveryLaterCall) {
  std::atomic<bool> broken = false;
  const FaultyDisks faulty(
      [&](const DiskRequest& r) { return broken && r.op == DiskOp::kRead ? Fault::error(EIO) : Fault::none(); });
  SwapFile file(this->file(), {kChunk, kChunk}, options(), 1);
  const Aligned a(kChunk, 1), read(kChunk, 3);
  file.start_write(0, a.span());
  file.start_write(1, a.span());
  file.finish_all();
  broken = true;
  const auto error = [&](auto fn) { return data::error_text<IoError>(*folder_, fn); };
  const std::string cause = error([&] {
    file.start_read(0, read.span());
    file.finish(0);
  });
  EXPECT_TRUE(cause.starts_with("[tiers.read] Input/output error")) << cause;
  broken = false;
  EXPECT_EQ(error([&] { file.finish(0); }), cause);
  EXPECT_EQ(error([&] { file.finish(1); }), cause);
  EXPECT_EQ(error([&] { file.start_read(1, read.span()); }), cause);
  EXPECT_EQ(error([&] { file.start_write(0, a.span()); }), cause);
  EXPECT_EQ(error([&] { file.finish_all(); }), cause);
  EXPECT_EQ(error([&] { file.pump(); }), cause);
}

TEST_P(Faults, AFlippedBitIsFoundByTheChecksum) {
  const std::string error = error_of([](const DiskRequest& r) {
    return r.op == DiskOp::kRead && r.offset == kBlock ? Fault::flips(4321) : Fault::none();
  });
  EXPECT_TRUE(
      error.starts_with("[tiers.read] the data is not what was written (DIR/swap.0, chunk 0 at byte 0, 262144 "
                        "bytes; checksum got "))
      << error;
  EXPECT_TRUE(
      error.ends_with("rank 1; nothing but this run may write there, else check the disk or choose another "
                      "nvme_path)"))
      << error;
}

TEST_P(Faults, AForeignWriteIsFoundByTheChecksum) {
  SwapFile file(this->file(), {kChunk}, options());
  const Aligned data(kChunk, 1), read(kChunk, 2);
  file.start_write(0, data.span());
  file.finish(0);
  const int fd = ::open(this->file().c_str(), O_WRONLY);
  const std::byte flipped = data[77777] ^ std::byte{1};
  ASSERT_EQ(::pwrite(fd, &flipped, 1, 77777), 1);
  ::close(fd);
  file.start_read(0, read.span());
  EXPECT_THROW(file.finish(0), IoError);
}

TEST_P(Faults, ATruncatedFileIsAnError) {
  for (const std::int64_t length : {std::int64_t{0}, kChunk + kBlock, kChunk + kBlock + 100}) {
    SwapFile file(this->file(), {kChunk, kChunk}, options(), 1);
    const Aligned data(kChunk, 1), read(kChunk, 2);
    file.start_write(0, data.span());
    file.start_write(1, data.span());
    file.finish_all();
    std::filesystem::resize_file(this->file(), static_cast<std::uintmax_t>(length));
    const std::string error = data::error_text<IoError>(*folder_, [&] {
      file.start_read(1, read.span());
      file.finish(1);
    });
    EXPECT_TRUE(error.starts_with("[tiers.read] the file ends too early (DIR/swap.0, chunk 1 at byte 262144, failed"))
        << error;
    EXPECT_TRUE(error.ends_with("rank 1; something else has cut it: nothing but this run may write there)")) << error;
  }
}

TEST_P(Faults, ASlowDiskLosesNothing) {
  EXPECT_TRUE(round_trip([](const DiskRequest& r) {
    return r.offset % (2 * kBlock) == 0 ? Fault::takes(std::chrono::milliseconds(5)) : Fault::none();
  }));
}

TEST_P(Faults, ADirectFileThatRefusesItsFirstTransferGoesThroughThePageCache) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  int refusals = 4;  // all that are in flight when the first comes back
  const bool same =
      round_trip([&](const DiskRequest&) { return refusals-- > 0 ? Fault::error(EINVAL) : Fault::none(); });
  set_log_sink({});
  EXPECT_TRUE(same);
  int said = 0;
  for (const std::string& line : lines) said += line.find("refuses transfers with O_DIRECT") != std::string::npos;
  EXPECT_EQ(said, 1);
}

INSTANTIATE_TEST_SUITE_P(Places, Faults, kPlaces, place_name);

}  // namespace
}  // namespace ballast::tiers
