#include "ballast/params/fault.h"

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"

namespace ballast {
namespace {

// Context of every DataPtr that FaultStorage installs; owns the memory, if there is any.
struct FaultContext {
  FaultHandler* handler;
  int unit;
  c10::DataPtr memory;
};

void delete_context(void* context) { delete static_cast<FaultContext*>(context); }

FaultContext* context_of(c10::StorageImpl* storage) {
  return storage->_mutable_data_ptr_no_checks().cast_context<FaultContext>(&delete_context);
}

// LibTorch 2.11 can arm a storage but not disarm it.
template <class Storage>
constexpr bool kCanDisarm = requires(Storage& s) {
  s.clear_data_ptr_access_error_msg_();
};

template <class Storage>
void disarm(Storage& storage) {
  if constexpr (kCanDisarm<Storage>) storage.clear_data_ptr_access_error_msg_();
}

// ---- the observer -------------------------------------------------------------------------------------------------

struct Pin {
  FaultHandler* handler;
  int unit;
  friend bool operator==(const Pin&, const Pin&) = default;
};
using Pins = c10::SmallVector<Pin, 4>;

// Units that one running operator holds mapped; dropped by the end callback of the same operator.
struct PinnedByOperator final : at::ObserverContext {
  Pins pins;
};

void collect(const at::Tensor& tensor, Pins& pins) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const FaultContext* context = context_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (context == nullptr) return;
  const Pin pin{context->handler, context->unit};
  if (std::find(pins.begin(), pins.end(), pin) == pins.end()) pins.push_back(pin);
}

void collect(const c10::IValue& value, Pins& pins) {
  if (value.isTensor()) {
    collect(value.toTensor(), pins);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor()) break;  // lists are of one type; optional tensors are tensors or None
      collect(element.toTensor(), pins);
    }
  }
}

// View operators (t, view, detach, ...) read no data: every result aliases an input that isn't written. The answer is
// kept by operator name, whose characters live as long as the operator's registration.
bool makes_only_views(const at::RecordFunction& function) {
  thread_local std::unordered_map<const void*, bool> known;
  const auto [entry, fresh] = known.try_emplace(function.name(), false);
  if (fresh) {
    if (const auto schema = function.operator_schema()) {
      entry->second = !schema->returns().empty();
      for (const c10::Argument& result : schema->returns())
        entry->second &= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    }
  }
  return entry->second;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  Pins pins;
  for (const c10::IValue& value : function.inputs()) collect(value, pins);
  if (pins.empty() || makes_only_views(function)) return nullptr;
  auto pinned = std::make_unique<PinnedByOperator>();
  pinned->pins = std::move(pins);
  // Gathering runs operators of its own, which must not be observed in turn.
  at::DisableRecordFunctionGuard unobserved;
  for (const Pin& pin : pinned->pins) pin.handler->touch_and_pin(pin.unit);
  return pinned;
}

void after_operator(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (const Pin& pin : static_cast<PinnedByOperator*>(context)->pins) pin.handler->unpin(pin.unit);
}

std::mutex observer_mutex;  // guards the two below; engines come and go on several threads
int observer_users = 0;
at::CallbackHandle observer_handle = 0;

}  // namespace

FaultStorage::FaultStorage(FaultHandler* handler, int unit, at::Tensor flat, const std::string& why_unmapped)
    : handler_(handler), unit_(unit), flat_(std::move(flat)), why_unmapped_(why_unmapped) {
  unmap();
}

void FaultStorage::install(c10::DataPtr memory) noexcept {
  void* data = memory.get();
  const c10::Device device = flat_.device();
  auto* context = new FaultContext{handler_, unit_, std::move(memory)};
  flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(data, context, &delete_context, device));
}

void FaultStorage::map() {
  c10::StorageImpl& storage = *flat_.storage().unsafeGetStorageImpl();
  c10::DataPtr memory;
  const c10::DeviceGuard on_its_device(flat_.device());  // a raw allocation goes to the thread's current device
  try {
    memory = c10::GetAllocator(flat_.device().type())->allocate(storage.nbytes());
  } catch (const std::exception& e) {
    throw MemoryError("params.map", "no memory to gather into (wanted ",
                      format_bytes(static_cast<std::int64_t>(storage.nbytes())), " on ", flat_.device().str(),
                      "; lower stage3_max_live_parameters: ", e.what(), ")");
  }
  disarm(storage);
  install(std::move(memory));
}

void FaultStorage::unmap() noexcept {
  install(c10::DataPtr(nullptr, flat_.device()));
  // Where it can be taken back, arm at once: a raw read outside an operator then says what to do, not "segmentation
  // fault".
  if constexpr (kCanDisarm<c10::StorageImpl>) arm(why_unmapped_);
}

bool FaultStorage::mapped() const noexcept {
  const FaultContext* context = context_of(flat_.storage().unsafeGetStorageImpl());
  return context == nullptr || context->memory.get() != nullptr || flat_.numel() == 0;
}

void FaultStorage::arm(const std::string& why) noexcept {
  flat_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

void FaultStorage::used_on_current_stream() const {
  const c10::Device device = flat_.device();
  if (device.is_cpu()) return;
  const FaultContext* context = context_of(flat_.storage().unsafeGetStorageImpl());
  if (context == nullptr || context->memory.get() == nullptr) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.recordDataPtrOnStream(context->memory, guard.getStream(device));
}

void FaultStorage::surrender(const std::string& why_empty) noexcept {
  c10::StorageImpl& storage = *flat_.storage().unsafeGetStorageImpl();
  FaultContext* context = context_of(&storage);
  if (context == nullptr) return;
  c10::DataPtr memory = std::move(context->memory);
  const bool empty = memory.get() == nullptr && flat_.numel() > 0;
  disarm(storage);
  storage.set_data_ptr_noswap(std::move(memory));
  if (empty) arm(why_empty);
}

FaultObserver::FaultObserver() {
  std::lock_guard lock(observer_mutex);
  if (observer_users++ == 0) {
    observer_handle = at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator)
                                                .needsInputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
  }
}

FaultObserver::~FaultObserver() {
  std::lock_guard lock(observer_mutex);
  if (--observer_users == 0) at::removeCallback(observer_handle);
}

}  // namespace ballast
