#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "ballast/comm/transport.h"

namespace c10d {
class Store;
}

namespace ballast {

/// Ranks that are threads of this process hand each other copies in its memory. store: over one HashStore. Collective.
/// CPU tensors only.
std::unique_ptr<Transport> make_threads(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

}  // namespace ballast
