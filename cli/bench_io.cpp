#include "cli/bench_io.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/tiers/disk_queue.h"
#include "ballast/tiers/run_folder.h"

namespace ballast::cli {
namespace {

using tiers::DiskFile;
using tiers::DiskOp;
using tiers::DiskOptions;
using tiers::DiskQueue;

constexpr std::array<std::int64_t, 4> kBlocks{256 << 10, 1 << 20, 4 << 20, 8 << 20};
constexpr std::array<int, 5> kDepths{1, 2, 4, 8, 16};
constexpr std::int64_t kLargestInFlight = kBlocks.back() * kDepths.back();
constexpr int kTurns = 6;  // with fio

/// Random bytes, since some disks and file systems are faster on others; page-aligned.
class Noise {
 public:
  Noise() {
    void* mapped = ::mmap(nullptr, kLargestInFlight, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw MemoryError("cli.bench_io", "no memory for buffers (", kLargestInFlight, " bytes)");
    data_ = static_cast<std::byte*>(mapped);
    std::minstd_rand random;
    for (std::int64_t at = 0; at < kLargestInFlight; at += 4) {
      const auto word = static_cast<std::uint32_t>(random());
      std::copy_n(reinterpret_cast<const std::byte*>(&word), 4, data_ + at);
    }
  }
  ~Noise() { ::munmap(data_, kLargestInFlight); }
  Noise(const Noise&) = delete;
  Noise& operator=(const Noise&) = delete;
  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Bytes a second of whole blocks in the order of the file, over and over for `seconds` (0: once through the file).
double bandwidth(const DiskFile& file, const Noise& noise, const DiskOptions& options, DiskOp op, double seconds) {
  const auto queue = make_disk_queue(file, options);
  const std::int64_t block = options.block_size;
  const std::span<std::byte> buffer(noise.data(), static_cast<std::size_t>(block * options.queue_depth));
  queue->register_buffers({&buffer, 1});
  const double start = now();
  std::int64_t begun = 0, moved = 0;
  const auto more = [&] { return seconds > 0 ? now() - start < seconds : begun < file.bytes(); };
  const auto begin = [&](std::uint64_t slot) {
    const tiers::DiskRequest request{.op = op,
                                     .offset = begun % file.bytes(),
                                     .data = noise.data() + static_cast<std::int64_t>(slot) * block,
                                     .bytes = block,
                                     .tag = slot};
    queue->submit({&request, 1});
    begun += block;
  };
  for (int slot = 0; slot < options.queue_depth && more(); ++slot) begin(static_cast<std::uint64_t>(slot));
  while (const auto completion = queue->reap(true)) {
    if (completion->result <= 0) {
      throw IoError("cli.bench_io", op == DiskOp::kRead ? "a read" : "a write",
                    " failed: ", tiers::errno_text(static_cast<int>(-completion->result)), " (", file.path().string(),
                    ", ", block, " bytes; choose another folder)");
    }
    moved += completion->result;
    if (more()) begin(completion->tag);
  }
  return static_cast<double>(moved) / (now() - start);
}

struct Speed {
  double read = 0, write = 0;  // bytes a second
  /// A swapped byte is read once and written once.
  double both() const { return 2 / (1 / read + 1 / write); }
};

struct Setting {
  std::int64_t block = 0;
  int depth = 0;
  Speed speed;
};

/// Without io_uring a request takes a thread for as long as it lasts, so the depth is that of threads.
DiskOptions disk_options(const BenchIoOptions& options, std::int64_t block, int depth) {
  return {.block_size = block, .queue_depth = depth, .threads = depth, .uring = options.uring};
}

void print_table(const char* title, const std::vector<Setting>& settings, double Speed::*speed) {
  std::printf("\n%-12s", title);
  for (const int depth : kDepths) std::printf("%9s %2d", "depth", depth);
  std::size_t next = 0;
  for (const std::int64_t block : kBlocks) {
    std::printf("\n%-12s", format_bytes(block).c_str());
    for (std::size_t i = 0; i < kDepths.size(); ++i) std::printf("%12.2f", settings[next++].speed.*speed / 1e9);
  }
  std::printf("\n");
}

/// Among settings that are as good as the best, within what the measurement can tell, that with the least in flight.
Setting best_of(const std::vector<Setting>& settings) {
  double most = 0;
  for (const Setting& setting : settings) most = std::max(most, setting.speed.both());
  std::optional<Setting> best;
  for (const Setting& setting : settings) {
    if (setting.speed.both() < 0.97 * most) continue;
    if (!best || setting.block * setting.depth < best->block * best->depth) best = setting;
  }
  return *best;
}

bool fio_installed() { return std::system("command -v fio > /dev/null 2>&1") == 0; }

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char letter : word) text += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return text + "'";
}

/// Bytes a second of fio with the same file, pattern, block size and depth; nothing where it fails.
std::optional<double> fio_bandwidth(const DiskFile& file, const DiskOptions& options, bool uring, DiskOp op,
                                    double seconds) {
  const char* const name = op == DiskOp::kRead ? "read" : "write";
  const std::string engine = uring ? "--ioengine=io_uring --fixedbufs --iodepth=" + std::to_string(options.queue_depth)
                                   : "--ioengine=psync --thread --numjobs=" + std::to_string(options.threads) +
                                         " --offset_increment=" + std::to_string(file.bytes() / options.threads);
  const std::int64_t size = uring ? file.bytes() : file.bytes() / options.threads;
  const std::string command = "fio --name=ballast --filename=" + quoted(file.path().string()) + " --rw=" + name +
                              " --bs=" + std::to_string(options.block_size) + " --size=" + std::to_string(size) + " " +
                              engine + " --direct=" + (file.direct() ? "1" : "0") +
                              " --time_based --runtime=" + std::to_string(static_cast<int>(seconds * 1000)) +
                              "ms --allow_file_create=0 --group_reporting --output-format=json 2> /dev/null";
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (!pipe) return std::nullopt;
  std::string output;
  std::array<char, 4096> part{};
  while (const std::size_t bytes = std::fread(part.data(), 1, part.size(), pipe)) output.append(part.data(), bytes);
  ::pclose(pipe);
  const auto start = output.find('{');
  if (start == std::string::npos) return std::nullopt;
  const auto report = nlohmann::json::parse(output.substr(start), nullptr, false);
  if (report.is_discarded() || !report.contains("jobs") || report["jobs"].empty()) return std::nullopt;
  const double speed = report["jobs"][0][name].value("bw_bytes", 0.0);
  return speed > 0 ? std::optional(speed) : std::nullopt;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The two take turns on the same file, now one first and now the other, so that what else the machine does hits both
/// alike.
void compare_with_fio(const DiskFile& file, const Noise& noise, const DiskOptions& options, bool uring,
                      double seconds) {
  for (const DiskOp op : {DiskOp::kRead, DiskOp::kWrite}) {
    std::vector<double> ours, theirs, ratios;
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto own = [&] { ours.push_back(bandwidth(file, noise, options, op, seconds)); };
      if (turn % 2 == 0) own();
      const auto fio = fio_bandwidth(file, options, uring, op, seconds);
      if (turn % 2 == 1) own();
      if (!fio) {
        std::printf("fio could not run the same pattern\n");
        return;
      }
      theirs.push_back(*fio);
      ratios.push_back(ours.back() / theirs.back());
    }
    std::printf("%-5s  ballast %.2f GB/s, fio %.2f GB/s: %.2fx (medians of %d turns, the ratios' too)\n",
                op == DiskOp::kRead ? "read" : "write", median(ours) / 1e9, median(theirs) / 1e9, median(ratios),
                kTurns);
  }
}

}  // namespace

int bench_io(const BenchIoOptions& options) {
  const tiers::RunFolder folder(options.path, 0);
  const DiskFile file(folder.path() / "bench", round_up(std::max(options.size, 2 * kLargestInFlight), kLargestInFlight),
                      0);
  const Noise noise;
  const std::string queue = make_disk_queue(file, disk_options(options, kBlocks[0], 1))->name();
  const bool uring = queue == "io_uring";
  // A first pass writes it all: space that is only reserved is read without a disk, and written more slowly.
  bandwidth(file, noise, disk_options(options, 4 << 20, 8), DiskOp::kWrite, 0);
  std::printf("%s: %s, %s, a file of %s, %.2g s a figure; in GB/s\n", options.path.string().c_str(),
              uring ? "io_uring" : "as many threads as the depth",
              file.direct() ? "O_DIRECT" : "through the page cache", format_bytes(file.bytes()).c_str(),
              options.seconds);
  std::vector<Setting> settings;
  for (const std::int64_t block : kBlocks) {
    for (const int depth : kDepths) {
      const DiskOptions disk = disk_options(options, block, depth);
      const double read = bandwidth(file, noise, disk, DiskOp::kRead, options.seconds);
      settings.push_back({block, depth, {read, bandwidth(file, noise, disk, DiskOp::kWrite, options.seconds)}});
    }
  }
  print_table("read", settings, &Speed::read);
  print_table("write", settings, &Speed::write);

  const Setting best = best_of(settings);
  std::printf("\nbest: %s at depth %d, read %.2f and write %.2f GB/s; to paste into a configuration:\n",
              format_bytes(best.block).c_str(), best.depth, best.speed.read / 1e9, best.speed.write / 1e9);
  std::printf("\"aio\": {\"block_size\": %lld, \"queue_depth\": %d%s}\n", static_cast<long long>(best.block),
              best.depth, uring ? "" : (", \"intra_op_parallelism\": " + std::to_string(best.depth)).c_str());
  if (fio_installed()) {
    std::printf("\n");
    compare_with_fio(file, noise, disk_options(options, best.block, best.depth), uring, options.seconds);
  } else {
    std::printf("\ninstall fio to see how this compares with it\n");
  }
  return 0;
}

}  // namespace ballast::cli
