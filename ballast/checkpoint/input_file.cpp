#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "ballast/base/math.h"
#include "ballast/checkpoint/descriptor.h"
#include "ballast/checkpoint/workers.h"

namespace ballast::ckpt {
namespace {

constexpr int kBlocks = 6, kThreads = 4;  // one block is read from while two are on their way

}  // namespace

struct InputFile::Impl {
  Impl(std::filesystem::path path, Owner owner)
      : file("checkpoint.read", std::move(path), O_RDONLY, owner), length(file.bytes()) {}

  struct Block {
    BlockMemory memory;
    std::int64_t number = -1, bytes = 0;
    std::uint64_t used = 0;
    std::future<void> read;
  };

  // The block, its read begun, in a buffer that holds none of those from `current` on.
  Block& start(std::int64_t number, std::int64_t current) {
    Block* oldest = nullptr;
    for (Block& block : blocks) {
      if (block.number == number) return block;
      const bool wanted = block.number >= current && block.number < current + kBlocks;
      if (!wanted && (oldest == nullptr || block.used < oldest->used)) oldest = &block;
    }
    Block& block = *oldest;
    if (block.read.valid()) block.read.wait();
    if (!block.memory) block.memory = block_memory();
    block.number = number;
    block.used = ++clock;
    block.read = workers.submit([this, &block, number] {
      const std::int64_t begin = number * kBlock;
      // Whole sectors also at the end, where the system returns what there is.
      const std::int64_t want = std::min(kBlock, round_up(length - begin, Descriptor::kAlign));
      block.bytes = file.read({block.memory.get(), static_cast<std::size_t>(want)}, begin);
    });
    return block;
  }

  void read(std::int64_t offset, std::span<std::byte> to) {
    auto want = static_cast<std::int64_t>(to.size());
    if (offset < 0 || want > length - offset) too_short(offset, want, std::max<std::int64_t>(0, length - offset));
    while (want > 0) {
      const std::int64_t number = offset / kBlock, within = offset % kBlock;
      Block& block = start(number, number);
      block.used = ++clock;
      const bool goes_on = number == last || number == last + 1;
      last = number;
      for (std::int64_t ahead = 1; goes_on && ahead < kBlocks && (number + ahead) * kBlock < length; ++ahead)
        start(number + ahead, number);
      if (block.read.valid()) {
        try {
          block.read.get();
        } catch (...) {
          block.number = -1;
          throw;
        }
      }
      const std::int64_t part = std::min(want, kBlock - within);
      if (part > block.bytes - within) too_short(offset, part, std::max<std::int64_t>(0, block.bytes - within));
      std::memcpy(to.data() + (to.size() - static_cast<std::size_t>(want)), block.memory.get() + within,
                  static_cast<std::size_t>(part));
      want -= part;
      offset += part;
    }
  }

  [[noreturn]] void too_short(std::int64_t offset, std::int64_t want, std::int64_t got) const {
    throw IoError("checkpoint.read", "the file ends too early (got ", got, ", want ", want, " bytes at byte ", offset,
                  "; ", file.path().string(), rank_text(file.owner()), "; it was cut, load another checkpoint)");
  }

  Descriptor file;
  const std::int64_t length;
  std::array<Block, kBlocks> blocks;
  std::int64_t last = -2;  // block that was asked for
  std::uint64_t clock = 0;
  Workers workers{kThreads};  // last: ends before what its jobs use
};

InputFile::InputFile(std::filesystem::path path, Owner owner) : impl_(std::make_unique<Impl>(std::move(path), owner)) {}
InputFile::~InputFile() = default;
const std::filesystem::path& InputFile::path() const { return impl_->file.path(); }
std::int64_t InputFile::bytes() const { return impl_->length; }
void InputFile::read(std::int64_t offset, std::span<std::byte> to) { impl_->read(offset, to); }
void InputFile::read_pages(std::int64_t offset, std::span<std::byte> to, std::int64_t least) const {
  const std::int64_t got = impl_->file.read(to, offset);
  if (got < least) impl_->too_short(offset, least, got);
}

}  // namespace ballast::ckpt
