#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/launch_env.h"
#include "ballast/comm/world.h"
#include "ballast/comm/world_state.h"

namespace ballast {

World World::from_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const WorldOptions& options) {
  if (!group) throw UseError("comm.from_process_group", "no process group");
  auto store = group->getStore();
  if (!store && group->getSize() > 1) {
    throw UseError("comm.from_process_group", "the process group has no store (rank ", group->getRank(), " of ",
                   group->getSize(), "); make it with one, or use World::from_store");
  }
  // The group's ranks may be any of the launcher's: the GPU is the launcher's choice.
  const auto launch = read_launch_env(process_env);
  return World(make_state(std::move(store), group->getRank(), group->getSize(),
                          launch ? launch->local_rank : group->getRank(), false, options));
}

}  // namespace ballast
