#include "cli/launch.h"

#include "ballast/comm/launch_env.h"

namespace ballast::cli {

World make_world(const RunFile& run) {
  WorldOptions options;
  options.device = run.train.device;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(run.engine.comm_timeout_seconds * 1000));
  return World::from_env(options);
}

Launched launched() {
  const auto env = read_launch_env(process_env);
  return env ? Launched{env->rank, env->size} : Launched{};
}

}  // namespace ballast::cli
