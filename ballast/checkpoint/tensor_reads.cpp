#include "ballast/checkpoint/tensor_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>

#include "ballast/base/math.h"
#include "ballast/checkpoint/descriptor.h"

namespace ballast::ckpt {
namespace {

constexpr std::size_t kThreads = 4;
constexpr std::int64_t kExtent = std::int64_t{32} << 20;
constexpr std::int64_t kPart = std::int64_t{256} << 10;  // what a core's cache still has when it is copied

/// Reads that lie one behind the other in one file.
struct Extent {
  std::vector<const TensorRead*> reads;
  std::int64_t begin = 0, end = 0;  // in the file
};

std::vector<Extent> extents_of(const std::vector<TensorRead>& reads) {
  std::vector<Extent> extents;
  for (const TensorRead& read : reads) {
    const std::int64_t begin = read.file->place(*read.tensor), bytes = read.tensor->end - read.tensor->begin;
    const bool next = !extents.empty() && extents.back().reads.back()->file == read.file &&
                      extents.back().end == begin && extents.back().end - extents.back().begin + bytes <= kExtent;
    if (!next) extents.push_back({{}, begin, begin});
    extents.back().reads.push_back(&read);
    extents.back().end += bytes;
  }
  return extents;
}

/// Takes an extent's bytes as they come.
class Sorter {
 public:
  Sorter(const Extent& extent, Owner owner) : extent_(extent), owner_(owner) { end_tensors(); }

  void take(std::span<const std::byte> data) {
    while (!data.empty()) {
      const auto left = static_cast<std::size_t>(bytes() - at_);
      const auto part = data.first(std::min({data.size(), left, static_cast<std::size_t>(kPart)}));
      sum_.add(part);
      keep(part);
      at_ += static_cast<std::int64_t>(part.size());
      data = data.subspan(part.size());
      end_tensors();
    }
  }

 private:
  const TensorRead& read() const { return *extent_.reads[next_]; }
  std::int64_t bytes() const { return read().tensor->end - read().tensor->begin; }

  void keep(std::span<const std::byte> part) const {
    const std::int64_t from = std::max(at_, read().begin);
    const std::int64_t until = std::min(at_ + static_cast<std::int64_t>(part.size()), read().end);
    if (from < until)
      std::memcpy(read().to + (from - read().begin), part.data() + (from - at_),
                  static_cast<std::size_t>(until - from));
  }

  // Those that are complete, empty ones included.
  void end_tensors() {
    for (; next_ < extent_.reads.size() && at_ == bytes(); ++next_, at_ = 0) {
      const std::uint64_t got = sum_.value();
      sum_ = Checksum();
      if (got != read().checksum)
        throw IoError("checkpoint.read", "the data is not what was written (", read().file->path().string(),
                      ", tensor ", read().tensor->name, "; checksum got ", checksum_text(got), ", want ",
                      checksum_text(read().checksum), rank_text(owner_), "; load another checkpoint)");
    }
  }

  const Extent& extent_;
  const Owner owner_;
  std::size_t next_ = 0;  // of the extent's reads
  std::int64_t at_ = 0;   // bytes of that one so far
  Checksum sum_;
};

void read_extent(const Extent& extent, Owner owner, std::byte* memory) {
  Sorter sorter(extent, owner);
  // Whole pages, which travel past the page cache.
  for (std::int64_t at = extent.begin; at < extent.end;) {
    const std::int64_t page = at / Descriptor::kAlign * Descriptor::kAlign;
    const std::int64_t wanted = std::min(extent.end - page, kBlock);
    const std::int64_t whole = round_up(wanted, Descriptor::kAlign);
    extent.reads.front()->file->read_pages(page, {memory, static_cast<std::size_t>(whole)}, wanted);
    sorter.take({memory + (at - page), static_cast<std::size_t>(page + wanted - at)});
    at = page + wanted;
  }
}

}  // namespace

void read_tensors(const std::vector<TensorRead>& reads, Owner owner) {
  const std::vector<Extent> extents = extents_of(reads);
  std::vector<std::exception_ptr> errors(extents.size());
  std::atomic<std::size_t> next{0}, end{extents.size()};  // end: nothing behind the first failure counts
  const auto work = [&] {
    BlockMemory memory;
    for (std::size_t i = next++; i < end; i = next++) {
      try {
        if (!memory) memory = block_memory();
        read_extent(extents[i], owner, memory.get());
      } catch (...) {
        errors[i] = std::current_exception();
        for (std::size_t now = end; i < now && !end.compare_exchange_weak(now, i);) {
        }
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    while (threads.size() + 1 < std::min(kThreads, extents.size())) threads.emplace_back(work);
    work();
  }
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace ballast::ckpt
