#include "ballast/checkpoint/tensor_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <span>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "ballast/base/math.h"
#include "ballast/checkpoint/descriptor.h"

namespace ballast::ckpt {
namespace {

constexpr std::size_t kThreads = 8;
constexpr std::int64_t kExtent = std::int64_t{32} << 20;  // at most; less where there is little for all threads
constexpr std::int64_t kLeastExtent = std::int64_t{4} << 20;
constexpr std::int64_t kWorthItsOwnRead = std::int64_t{1} << 20;
constexpr std::int64_t kPart = std::int64_t{256} << 10;  // what a core's cache still has when it is copied

/// A tensor, and the parts of it that are kept.
using Kept = std::span<const TensorRead>;

/// Tensors that lie one behind the other in one file.
struct Extent {
  std::vector<Kept> tensors;
  std::int64_t begin = 0, end = 0;  // in the file
  const SafetensorsReader& file() const { return *tensors.front().front().file; }
};

void sort_by_place(std::vector<TensorRead>& reads) {
  std::unordered_map<const SafetensorsReader*, std::size_t> order;  // of the files
  for (const TensorRead& read : reads) order.emplace(read.file.get(), order.size());
  const auto place = [&](const TensorRead& read) {
    return std::tuple(order.at(read.file.get()), read.tensor->begin, read.tensor->end);
  };
  std::stable_sort(reads.begin(), reads.end(),
                   [&](const TensorRead& a, const TensorRead& b) { return place(a) < place(b); });
}

// reads: sorted, and what the extents refer to.
std::vector<Extent> extents_of(const std::vector<TensorRead>& reads) {
  std::vector<Extent> extents;
  std::int64_t all = 0;
  for (const TensorRead& read : reads) all += read.tensor->end - read.tensor->begin;
  const std::int64_t most = std::clamp(all / static_cast<std::int64_t>(kThreads), kLeastExtent, kExtent);
  for (auto next = reads.begin(); next != reads.end();) {
    const auto first = next;
    next = std::find_if(first, reads.end(), [&](const TensorRead& read) { return read.tensor != first->tensor; });
    const std::int64_t begin = first->file->place(*first->tensor), bytes = first->tensor->end - first->tensor->begin;
    const bool follows = !extents.empty() && &extents.back().file() == first->file.get() &&
                         extents.back().end == begin && extents.back().end - extents.back().begin + bytes <= most;
    if (!follows) extents.push_back({{}, begin, begin});
    extents.back().tensors.emplace_back(first, next);
    extents.back().end += bytes;
  }
  return extents;
}

/// Takes an extent's bytes as they come.
class Sorter {
 public:
  Sorter(const Extent& extent, Owner owner) : extent_(extent), owner_(owner) { end_tensors(); }

  /// Where the next bytes go; empty if they aren't kept.
  std::span<std::byte> place() const {
    for (const TensorRead& read : kept())
      if (read.begin <= at_ && at_ < read.end)
        return {read.to + (at_ - read.begin), static_cast<std::size_t>(read.end - at_)};
    return {};
  }

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
  Kept kept() const { return extent_.tensors[next_]; }
  std::int64_t bytes() const { return kept().front().tensor->end - kept().front().tensor->begin; }

  void keep(std::span<const std::byte> part) const {
    for (const TensorRead& read : kept()) {
      const std::int64_t from = std::max(at_, read.begin);
      const std::int64_t until = std::min(at_ + static_cast<std::int64_t>(part.size()), read.end);
      if (from >= until) continue;
      std::byte* const to = read.to + (from - read.begin);
      const std::byte* const data = part.data() + (from - at_);
      if (to != data) std::memcpy(to, data, static_cast<std::size_t>(until - from));
    }
  }

  // Those that are complete, empty ones included.
  void end_tensors() {
    for (; next_ < extent_.tensors.size() && at_ == bytes(); ++next_, at_ = 0) {
      const std::uint64_t got = sum_.value();
      sum_ = Checksum();
      const TensorRead& read = kept().front();
      if (got != read.checksum)
        throw IoError("checkpoint.read", "the data is not what was written (", read.file->path().string(), ", tensor ",
                      read.tensor->name, "; checksum got ", checksum_text(got), ", want ", checksum_text(read.checksum),
                      rank_text(owner_), "; load another checkpoint)");
    }
  }

  const Extent& extent_;
  const Owner owner_;
  std::size_t next_ = 0;  // of the extent's tensors
  std::int64_t at_ = 0;   // bytes of that one so far
  Checksum sum_;
};

void read_extent(const Extent& extent, Owner owner, std::byte* memory) {
  Sorter sorter(extent, owner);
  // Whole pages, which travel past the page cache: straight to where they belong where that is much, and its pages are
  // the file's.
  for (std::int64_t at = extent.begin; at < extent.end;) {
    const std::int64_t page = at / Descriptor::kAlign * Descriptor::kAlign;
    std::int64_t wanted = std::min(extent.end - page, kBlock);
    std::byte* to = memory;
    const std::span<std::byte> place = sorter.place();
    const auto within = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(place.data()) % Descriptor::kAlign);
    if (static_cast<std::int64_t>(place.size()) >= kWorthItsOwnRead && within == at - page) {
      if (within > 0) {
        wanted = Descriptor::kAlign;
      } else {
        to = place.data();
        wanted = std::min(static_cast<std::int64_t>(place.size()) / Descriptor::kAlign * Descriptor::kAlign, kBlock);
      }
    }
    const std::int64_t whole = round_up(wanted, Descriptor::kAlign);
    extent.file().read_pages(page, {to, static_cast<std::size_t>(whole)}, wanted);
    sorter.take({to + (at - page), static_cast<std::size_t>(page + wanted - at)});
    at = page + wanted;
  }
}

}  // namespace

void read_tensors(std::vector<TensorRead> reads, Owner owner) {
  sort_by_place(reads);
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
