#include "ballast/config/bind.h"

namespace ballast::schema {

const std::vector<Key<Config>>& aio_keys() {
  static const std::vector<Key<Config>> keys{
      bind<Config>(
          {.path = "aio.block_size",
           .allowed = integer(4096, 1 << 30),
           .meaning = "Bytes of one read or write of a swap file at most, rounded up to a multiple of 4096."},
          [](auto& c) -> auto& { return c.aio.block_size; }),
      bind<Config>(
          {.path = "aio.queue_depth",
           .allowed = integer(1, 4096),
           .meaning = "Reads or writes of one chunk in flight at most. `ballast bench-io` finds the best "
                      "block size and depth of a disk."},
          [](auto& c) -> auto& { return c.aio.queue_depth; }),
      bind<Config>(
          {.path = "aio.intra_op_parallelism",
           .allowed = integer(1, 256),
           .meaning = "Threads that read and write one swap file where io_uring is refused; with io_uring "
                      "there are none (DeepSpeed: 1).",
           .alias = "aio.thread_count"},
          [](auto& c) -> auto& { return c.aio.intra_op_parallelism; }),
  };
  return keys;
}

}  // namespace ballast::schema
