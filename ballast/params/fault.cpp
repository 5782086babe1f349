#include "ballast/params/fault.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <mutex>
#include <string_view>
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

// Calls visit(tensor, context) for each tensor in the value whose storage is ours.
template <class Visit>
void visit_ours(const at::Tensor& tensor, const Visit& visit) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const FaultContext* context = context_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (context != nullptr) visit(tensor, *context);
}

template <class Visit>
void visit_ours(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit_ours(value.toTensor(), visit);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor()) break;  // lists are of one type; optional tensors are tensors or None
      visit_ours(element.toTensor(), visit);
    }
  }
}

struct OperatorKind {
  bool makes_only_views = false;  // t, view, detach, ...: reads no data
  std::uint64_t writes = 0;       // bit i: writes to the data of its argument i
};

// What an operator's schema marks as written need not be data: some only change what the tensor is a view of, and a few
// others what is known about it.
bool writes_data(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  const auto handle = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!handle || handle->hasTag(at::Tag::inplace_view)) return false;
  constexpr std::string_view kOthers[] = {"aten::detach_",        "aten::record_stream", "aten::rename_",
                                          "aten::requires_grad_", "aten::retain_grad",   "aten::set_data"};
  return std::find(std::begin(kOthers), std::end(kOthers), name->name) == std::end(kOthers);
}

OperatorKind find_out(const at::RecordFunction& function) {
  OperatorKind kind;
  const auto schema = function.operator_schema();
  if (!schema) return kind;
  // Every result aliases an input that isn't written.
  kind.makes_only_views = !schema->returns().empty();
  for (const c10::Argument& result : schema->returns())
    kind.makes_only_views &= result.alias_info() != nullptr && !result.alias_info()->isWrite();
  const auto& arguments = schema->arguments();
  for (std::size_t i = 0; i < std::min<std::size_t>(arguments.size(), 64); ++i)
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite())
      kind.writes |= std::uint64_t{1} << i;
  if (kind.writes != 0 && !writes_data(function)) kind.writes = 0;
  return kind;
}

// The answer is kept by operator name, whose characters live as long as the operator's registration.
const OperatorKind& kind_of(const at::RecordFunction& function) {
  thread_local std::unordered_map<const void*, OperatorKind> known;
  const auto [entry, fresh] = known.try_emplace(function.name());
  if (fresh) entry->second = find_out(function);
  return entry->second;
}

void report_writes(c10::ArrayRef<const c10::IValue> inputs, std::uint64_t writes) {
  for (std::size_t i = 0; i < inputs.size() && writes != 0; ++i, writes >>= 1)
    if ((writes & 1) != 0)
      visit_ours(inputs[i], [](const at::Tensor& tensor, const FaultContext& context) {
        if (tensor.numel() > 0 && context.handler->is_here())
          context.handler->written(context.unit, tensor.storage_offset());
      });
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  Pins pins;
  for (const c10::IValue& value : function.inputs())
    visit_ours(value, [&](const at::Tensor&, const FaultContext& context) {
      if (!context.handler->is_here()) return context.handler->touch_in_child(context.unit);
      const Pin pin{context.handler, context.unit};
      if (std::find(pins.begin(), pins.end(), pin) == pins.end()) pins.push_back(pin);
    });
  if (pins.empty()) return nullptr;
  const OperatorKind& kind = kind_of(function);
  if (kind.makes_only_views) return nullptr;
  auto pinned = std::make_unique<PinnedByOperator>();
  pinned->pins = std::move(pins);
  // Gathering runs operators of its own, which must not be observed in turn, nor be taken for the caller's by what it
  // has put around them: Python's modes (fake tensors), transforms of torch.func, traces.
  at::DisableRecordFunctionGuard unobserved;
  static constexpr c10::DispatchKeySet kAround(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
       c10::DispatchKey::Functionalize, c10::DispatchKey::Tracer});
  const c10::impl::ExcludeDispatchKeyGuard plainly(kAround);
  for (const Pin& pin : pinned->pins) pin.handler->touch_and_pin(pin.unit);
  if (kind.writes != 0) report_writes(function.inputs(), kind.writes);
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

FaultStorage::FaultStorage(FaultHandler* handler, int unit, at::Tensor flat, const std::string& why_unmapped,
                           bool mapped)
    : handler_(handler), unit_(unit), flat_(std::move(flat)), why_unmapped_(why_unmapped) {
  if (mapped) {
    c10::StorageImpl& storage = *flat_.storage().unsafeGetStorageImpl();
    install(storage.set_data_ptr(c10::DataPtr(nullptr, flat_.device())));
  } else {
    unmap();
  }
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

void FaultStorage::set_aside() noexcept {
  FaultContext* context = context_of(flat_.storage().unsafeGetStorageImpl());
  if (context == nullptr || is_aside_) return;
  is_aside_ = true;
  aside_ = std::move(context->memory);
  unmap();
}

void FaultStorage::put_back() noexcept {
  if (!is_aside_) return;
  is_aside_ = false;
  disarm(*flat_.storage().unsafeGetStorageImpl());
  install(std::move(aside_));
}

bool FaultStorage::mapped() const noexcept {
  const FaultContext* context = context_of(flat_.storage().unsafeGetStorageImpl());
  return context == nullptr || context->memory.get() != nullptr || flat_.numel() == 0;
}

void FaultStorage::arm(const std::string& why) noexcept {
  flat_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

void FaultStorage::arm_in_child(const std::string& name) noexcept {
  if (mapped()) return;
  arm(Error("params.fork", "unit ", name,
            " isn't in memory, and this is a forked child of the process that has the engine (start the process anew, "
            "as multiprocessing's \"spawn\" does, or make an engine in it)")
          .what());
}

void FaultStorage::filled_on_current_stream() {
  const c10::Device device = flat_.device();
  if (device.is_cpu()) return;
  filled_on_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  filled_ = tiers::DeviceEvent(*filled_on_);
}

void FaultStorage::used_on_current_stream() const {
  const c10::Device device = flat_.device();
  if (device.is_cpu()) return;
  const FaultContext* context = context_of(flat_.storage().unsafeGetStorageImpl());
  if (context == nullptr || context->memory.get() == nullptr) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (filled_on_ && *filled_on_ != stream) filled_.block(stream);
  guard.recordDataPtrOnStream(context->memory, stream);
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
