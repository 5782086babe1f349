#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ballast {

/// What a launcher told this process by environment variables.
struct LaunchEnv {
  std::string launcher;  // "torchrun", "mpirun", "srun"
  int rank = 0, size = 1, local_rank = 0;
  std::string host;  // of the rendezvous
  std::uint16_t port = 0;
  bool store_is_served = false;  // torchrun's agent serves the rendezvous already: every rank is a client
  std::string attempt = "0";     // torchrun restarts workers on the same rendezvous
};

/// Value of a variable, if it is set and not empty.
using EnvLookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Nothing where no launcher's variables are set. Throws UseError, which names the variable and its value.
std::optional<LaunchEnv> read_launch_env(const EnvLookup& lookup);
/// The process's own environment.
std::optional<std::string> process_env(const std::string& name);

}  // namespace ballast
