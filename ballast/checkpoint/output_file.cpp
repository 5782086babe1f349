#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "ballast/base/math.h"
#include "ballast/checkpoint/descriptor.h"
#include "ballast/checkpoint/workers.h"

namespace ballast::ckpt {
namespace {

constexpr int kBlocks = 6, kThreads = 4;  // one block fills while two are on their way

}  // namespace

struct OutputFile::Impl {
  Impl(std::filesystem::path path, Owner owner, std::int64_t bytes)
      : file("checkpoint.write", std::move(path), O_WRONLY | O_CREAT | O_TRUNC, owner), length(bytes) {
    file.reserve(bytes);
  }

  struct Block {
    BlockMemory memory;
    std::future<void> written;
  };

  // The first failure ends the file.
  template <class Fn>
  void guarded(Fn&& fn) {
    if (cause) std::rethrow_exception(cause);
    try {
      fn();
    } catch (...) {
      cause = std::current_exception();
      throw;
    }
  }

  void send(std::int64_t length) {
    Block& block = blocks[current];
    const std::span<const std::byte> data(block.memory.get(), static_cast<std::size_t>(length));
    block.written = workers.submit([this, data, offset = sent] { file.write(data, offset); });
    sent += length;
    filled = 0;
    current = (current + 1) % kBlocks;
    if (blocks[current].written.valid()) blocks[current].written.get();
  }

  void write(std::span<const std::byte> data) {
    total += static_cast<std::int64_t>(data.size());
    while (!data.empty()) {
      Block& block = blocks[current];
      if (!block.memory) block.memory = block_memory();
      const std::size_t part = std::min(data.size(), static_cast<std::size_t>(kBlock - filled));
      std::memcpy(block.memory.get() + filled, data.data(), part);
      filled += static_cast<std::int64_t>(part);
      data = data.subspan(part);
      if (filled == kBlock) send(kBlock);
    }
  }

  void finish() {
    if (filled > 0) {
      // Whole sectors, cut afterwards: the end travels as the rest does.
      const std::int64_t padded = round_up(filled, Descriptor::kAlign);
      std::memset(blocks[current].memory.get() + filled, 0, static_cast<std::size_t>(padded - filled));
      send(padded);
    }
    for (Block& block : blocks)
      if (block.written.valid()) block.written.get();
    if (std::max(sent, length) != total) file.cut(total);
    file.sync();
    file.close();
  }

  Descriptor file;
  const std::int64_t length;  // that it has
  std::array<Block, kBlocks> blocks;
  std::size_t current = 0;
  std::int64_t filled = 0, sent = 0, total = 0;  // bytes: in the current block, given to the workers, given to us
  std::exception_ptr cause;
  Workers workers{kThreads};  // last: ends before what its jobs use
};

OutputFile::OutputFile(std::filesystem::path path, Owner owner, std::int64_t bytes)
    : impl_(std::make_unique<Impl>(std::move(path), owner, bytes)) {}
OutputFile::~OutputFile() = default;
void OutputFile::write(std::span<const std::byte> data) {
  impl_->guarded([&] { impl_->write(data); });
}
void OutputFile::finish() {
  impl_->guarded([&] { impl_->finish(); });
}
std::int64_t OutputFile::bytes() const { return impl_->total; }

}  // namespace ballast::ckpt
