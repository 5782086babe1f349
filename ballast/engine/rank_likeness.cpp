#include "ballast/engine/rank_likeness.h"

#include <c10/util/ArrayRef.h>

#include <cstring>
#include <sstream>

#include "ballast/base/error.h"

namespace ballast {
namespace {

// FNV-1a (Fowler, Noll, Vo), over bytes or whole words.
constexpr std::uint64_t kHashStart = 0xcbf29ce484222325;
void hash_in(std::uint64_t& hash, std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3; }

// Cut to what a double holds exactly.
double digest(const std::string& text) {
  std::uint64_t hash = kHashStart;
  for (unsigned char c : text) hash_in(hash, c);
  return static_cast<double>(hash >> 12);
}

}  // namespace

void check_same_everywhere(Rounds& rounds, const Config& config, const Layout& layout) {
  std::ostringstream parameters;
  for (const ParameterInfo& p : layout.parameters)
    parameters << p.name() << c10::IntArrayRef(p.shape) << c10::toString(p.dtype) << p.trainable << p.unit << p.group
               << ';';
  const std::vector<double> mine{digest(describe(config)), static_cast<double>(layout.parameters.size()),
                                 digest(parameters.str())};
  const auto all = rounds.exchange(mine);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r][0] != all[0][0])
      throw CommError("engine.Engine", "ranks have different configurations (rank 0 and rank ", r,
                      " differ; give all ranks the same file)");
    if (all[r] != all[0])
      throw CommError("engine.Engine", "ranks have different models (rank 0: ", all[0][1], " parameters, rank ", r,
                      ": ", all[r][1], "; names, shapes, types, trainability or groups differ)");
  }
}

void check_same_request(Rounds& rounds, const char* operation, const char* remedy, const std::string& request) {
  const auto all = rounds.exchange({digest(request)});
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw UseError(operation, "ranks ask for different things (rank 0 and rank ", r, " differ; ", remedy, ")");
}

std::uint64_t digest(const std::vector<double>& rates) {
  std::uint64_t hash = kHashStart;
  for (double rate : rates) {
    std::uint64_t bits;
    const double positive_zero = rate + 0.0;
    std::memcpy(&bits, &positive_zero, sizeof bits);
    hash_in(hash, bits);
  }
  return hash;
}

void refuse_different_rates(Rounds& rounds, const std::vector<double>& mine) {
  const auto all = rounds.exchange(mine);
  std::size_t other = 1;
  while (other + 1 < all.size() && all[other] == all.front()) ++other;
  throw CommError("engine.step", "ranks have different learning rates (rank 0: ", c10::ArrayRef<double>(all.front()),
                  ", rank ", other, ": ", c10::ArrayRef<double>(all[other]), "; call set_lr() alike on all ranks)");
}

}  // namespace ballast
