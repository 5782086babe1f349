#include "ballast/comm/launch_env.h"

#include <charconv>
#include <cstdlib>

#include "ballast/base/error.h"

namespace ballast {
namespace {

constexpr const char* kOperation = "comm.from_env";
constexpr std::int64_t kDefaultPort = 29500;  // torchrun's

class Reader {
 public:
  explicit Reader(const EnvLookup& lookup) : lookup_(lookup) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }
  std::optional<std::string> text(const std::string& name) const { return lookup_(name); }

  std::optional<std::int64_t> number(const std::string& name, std::int64_t low, std::int64_t high) const {
    const auto value = lookup_(name);
    if (!value) return std::nullopt;
    std::int64_t number = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, number);
    if (error != std::errc() || stop != end || number < low || number > high) {
      throw UseError(kOperation, "environment variable ", name, " is wrong (", name, "=", *value,
                     "; allowed: integers from ", low, " to ", high, ")");
    }
    return number;
  }

  std::int64_t need(const std::string& name, std::int64_t low, std::int64_t high, const std::string& beside) const {
    if (const auto value = number(name, low, high)) return *value;
    throw UseError(kOperation, "environment variable ", name, " is missing (", beside, " is set, so ", name,
                   " must be too)");
  }

 private:
  const EnvLookup& lookup_;
};

constexpr std::int64_t kMaxRanks = 1 << 20;

void read_ranks(const Reader& env, const std::string& rank, const std::string& size, const std::string& local_rank,
                LaunchEnv& launch) {
  launch.size = static_cast<int>(env.need(size, 1, kMaxRanks, rank));
  launch.rank = static_cast<int>(env.need(rank, 0, launch.size - 1, size));
  launch.local_rank = static_cast<int>(env.number(local_rank, 0, kMaxRanks).value_or(0));
}

/// First host of a list in Slurm's notation: "node[07-09,12],login" -> "node07".
std::string first_host(const std::string& list) {
  const std::size_t end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const std::size_t close = list.find(']', end), number_end = list.find_first_of(",-]", end + 1);
  if (close == std::string::npos) return list.substr(0, end);
  std::string suffix = list.substr(close + 1);  // "rack[1-2]-a": what follows the bracket belongs to the name
  return list.substr(0, end) + list.substr(end + 1, number_end - end - 1) +
         suffix.substr(0, suffix.find_first_of(",["));
}

}  // namespace

std::optional<LaunchEnv> read_launch_env(const EnvLookup& lookup) {
  const Reader env(lookup);
  LaunchEnv launch;
  std::optional<std::string> default_host = "127.0.0.1";
  std::int64_t default_port = kDefaultPort;
  if (env.has("RANK") || env.has("WORLD_SIZE")) {
    launch.launcher = "torchrun";
    read_ranks(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", launch);
    launch.store_is_served = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    launch.attempt = env.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  } else if (env.has("OMPI_COMM_WORLD_RANK") || env.has("OMPI_COMM_WORLD_SIZE")) {
    launch.launcher = "mpirun";
    read_ranks(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", launch);
    // mpirun doesn't say where rank 0 is; all ranks on this machine need no answer.
    if (env.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxRanks).value_or(1) != launch.size) default_host.reset();
  } else if (env.has("SLURM_PROCID") && env.has("SLURM_STEP_NUM_TASKS")) {
    // The batch script itself has SLURM_PROCID=0 and the job's SLURM_NTASKS; only srun's tasks have a step's count.
    launch.launcher = "srun";
    read_ranks(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", launch);
    default_host.reset();
    if (const auto nodes = env.text("SLURM_STEP_NODELIST")) default_host = first_host(*nodes);
    // Jobs that share a node must not meet on one port.
    default_port += env.number("SLURM_JOB_ID", 0, INT64_MAX).value_or(0) % 10000;
  } else {
    return std::nullopt;
  }
  launch.port = static_cast<std::uint16_t>(env.number("MASTER_PORT", 1, 65535).value_or(default_port));
  const auto host = env.has("MASTER_ADDR") ? env.text("MASTER_ADDR") : default_host;
  if (!host) {
    throw UseError(kOperation, "environment variable MASTER_ADDR is missing (", launch.launcher, " started ",
                   launch.size, " ranks on several machines; set it to the host of rank 0)");
  }
  launch.host = *host;
  return launch;
}

std::optional<std::string> process_env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace ballast
