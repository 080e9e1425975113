// Connects targets to XLA. The only file that sees XLA's headers.
//
// An operand is a host array, which is copied to the device, or the handle (uint32[8]) of a tensor that is there: bit i
// of the attribute `handles` is set for operand i. Results are host arrays, and the call waits for them; or, where
// `is_resident` is set and every operand is a handle, handles of new tensors, and the call enqueues and returns. The
// last `num_after` operands are dependencies only: they make XLA run their producers first.
#include <cstring>
#include <mutex>

#include "target.h"
#include "xla/ffi/api/ffi.h"

namespace deepinfer::custom_calls {
namespace {

namespace ffi = xla::ffi;
using ascend::BridgeError;
using ascend::Code;
using ascend::Device;
using ascend::Handle;
using ascend::HandleTable;
using ascend::kHandleWords;
using ascend::Runtime;

struct Frame {
  int32_t ordinal;
  ffi::RemainingArgs args;
  ffi::RemainingRets rets;
  ffi::Dictionary attributes;
};

DataType CarrierOf(ffi::DataType dtype, const std::string& what) {
  switch (dtype) {
    case ffi::F32:
      return DataType::kFloat;
    case ffi::F16:
      return DataType::kFloat16;
    case ffi::BF16:
      return DataType::kBf16;
    case ffi::F64:
      return DataType::kDouble;
    case ffi::PRED:
      return DataType::kBool;
    case ffi::S8:
      return DataType::kInt8;
    case ffi::S16:
      return DataType::kInt16;
    case ffi::S32:
      return DataType::kInt32;
    case ffi::S64:
      return DataType::kInt64;
    case ffi::U8:
      return DataType::kUint8;
    case ffi::U16:
      return DataType::kUint16;
    case ffi::U32:
      return DataType::kUint32;
    case ffi::U64:
      return DataType::kUint64;
    case ffi::F8E4M3FN:
      return DataType::kFloat8E4m3;
    case ffi::F8E5M2:
      return DataType::kFloat8E5m2;
    case ffi::F8E8M0FNU:
      return DataType::kFloat8E8m0;
    default:
      throw BridgeError(Code::kInvalidArgument, what + " has XLA type " + std::to_string(static_cast<int>(dtype)) +
                                                    ", which does not cross the bridge; 4-bit values cross as uint8, "
                                                    "two in a byte");
  }
}

ffi::AnyBuffer Argument(const Frame& frame, size_t index) { return frame.args.get<ffi::AnyBuffer>(index).value(); }

ffi::AnyBuffer ResultBuffer(const Frame& frame, size_t index) { return *frame.rets.get<ffi::AnyBuffer>(index).value(); }

Tensor TensorOf(ffi::AnyBuffer buffer, const std::string& what) {
  const auto dims = buffer.dimensions();
  return ResultOf(CarrierOf(buffer.element_type(), what), Dims(dims.begin(), dims.end()));
}

std::string Described(const Tensor& tensor) {
  return ascend::DimsText(tensor.dims) + " of type code " + std::to_string(static_cast<int32_t>(tensor.dtype));
}

const uint32_t* WordsOf(ffi::AnyBuffer buffer, const std::string& what) {
  if (buffer.element_type() != ffi::U32 || buffer.element_count() != kHandleWords) {
    throw BridgeError(Code::kInvalidArgument, what + " is no handle: a resident call takes and gives uint32[8]");
  }
  return static_cast<const uint32_t*>(buffer.untyped_data());
}

template <class T>
T ReadAttribute(const Frame& frame, const Target& target, const char* name) {
  const auto value = frame.attributes.get<T>(name);
  if (!value.has_value()) {
    throw BridgeError(Code::kInvalidArgument, std::string(target.name) + ": attribute " + name +
                                                  " is missing or has another type than TARGETS.md says");
  }
  return *value;
}

AttributeValues ReadAttributes(const Frame& frame, const Target& target) {
  AttributeValues values;
  for (const Attribute& attribute : target.attributes) {
    if (attribute.type == Attribute::kF64) {
      values[attribute.name] = ReadAttribute<double>(frame, target, attribute.name);
    } else {
      values[attribute.name] = ReadAttribute<int64_t>(frame, target, attribute.name);
    }
  }
  return values;
}

bool IsHandle(const Frame& frame, const Target& target, size_t operand) {
  return (ReadAttribute<int64_t>(frame, target, "handles") >> operand & 1) != 0;
}

void NeedResults(const Frame& frame, const Target& target, size_t wanted) {
  if (frame.rets.size() != wanted) {
    throw BridgeError(Code::kInvalidArgument, std::string(target.name) + " gives " + std::to_string(wanted) +
                                                  " results, and " + std::to_string(frame.rets.size()) +
                                                  " were asked for");
  }
}

// Gives the arena back what the call took, unless it is kept.
class ArenaScope {
 public:
  explicit ArenaScope(Device& device) : device_(device), mark_(device.arena().mark()) {}
  ~ArenaScope() {
    if (!is_kept_) device_.arena().Rewind(mark_);
  }
  void Keep() { is_kept_ = true; }

 private:
  Device& device_;
  size_t mark_;
  bool is_kept_ = false;
};

bool HasWork(const std::vector<Tensor>& results) {
  for (const Tensor& result : results) {
    if (ascend::CountOf(result.dims) > 0) return true;
  }
  return false;
}

void Place(const Target& target, const Request& request, Call& call, std::vector<Tensor>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const bool is_operand = target.is_in_place && i == 0;
    results[i].address = is_operand ? request.in(0).address : call.Temporary(results[i].dtype, results[i].dims).address;
  }
}

// The host buffers belong to XLA: nothing queued may touch them once the call is over, also when it failed.
void CopyInRunCopyOut(const Target& target, const Frame& frame, Request& request, Call& call,
                      std::vector<Tensor>& results) {
  Device& device = call.device();
  try {
    for (size_t i = 0; i < request.num_inputs(); ++i) {
      if (IsHandle(frame, target, i)) continue;
      Tensor& input = request.in(i);
      input.address = call.Temporary(input.dtype, input.dims).address;
      device.Upload(input, Argument(frame, i).untyped_data());
    }
    Place(target, request, call, results);
    target.enqueue(request, call, results);
    for (size_t i = 0; i < results.size(); ++i) device.Download(ResultBuffer(frame, i).untyped_data(), results[i]);
  } catch (const BridgeError&) {
    try {
      device.Synchronize();
    } catch (const BridgeError&) {
      // The first failure is the one to tell; a fault of the device has been noted there.
    }
    throw;
  }
  device.Synchronize();
}

// Operands that the target reads.
size_t CountOperands(const Target& target, const Frame& frame) {
  const auto num_after = static_cast<size_t>(ReadAttribute<int64_t>(frame, target, "num_after"));
  if (num_after > frame.args.size()) {
    throw BridgeError(Code::kInvalidArgument, std::string(target.name) + ": num_after is more than the operands");
  }
  return frame.args.size() - num_after;
}

// The operands with their types and shapes; those that are handles with their addresses too.
std::vector<Tensor> ReadOperands(const Target& target, const Frame& frame, const HandleTable& handles) {
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < CountOperands(target, frame); ++i) {
    const std::string what = std::string(target.name) + ": operand " + std::to_string(i);
    inputs.push_back(IsHandle(frame, target, i) ? handles.Get(WordsOf(Argument(frame, i), what))
                                                : TensorOf(Argument(frame, i), what));
  }
  return inputs;
}

void NeedArrays(const Target& target, const Frame& frame, const std::vector<Tensor>& results) {
  if (target.is_in_place && IsHandle(frame, target, 0)) {
    throw BridgeError(Code::kInvalidArgument,
                      std::string(target.name) + ": a handle that is written in place gives handles, not arrays");
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const Tensor given = TensorOf(ResultBuffer(frame, i), std::string(target.name) + ": result " + std::to_string(i));
    if (given.dims != results[i].dims || given.dtype != results[i].dtype) {
      throw BridgeError(Code::kInvalidArgument, std::string(target.name) + ": result " + target.results[i].name +
                                                    " was asked for as " + Described(given) + "; it is " +
                                                    Described(results[i]));
    }
  }
}

void GiveArrays(const Target& target, const Frame& frame, Request& request, Call& call, std::vector<Tensor>& results) {
  NeedArrays(target, frame, results);
  ArenaScope scope(call.device());
  if (HasWork(results)) CopyInRunCopyOut(target, frame, request, call, results);
}

void GiveHandles(const Target& target, const Frame& frame, const Request& request, Call& call, HandleTable& handles,
                 std::vector<Tensor>& results) {
  std::vector<uint32_t*> words;
  for (size_t i = 0; i < results.size(); ++i) {
    words.push_back(const_cast<uint32_t*>(WordsOf(ResultBuffer(frame, i), std::string(target.name) + ": result")));
  }
  for (size_t i = 0; i < request.num_inputs(); ++i) {
    if (!IsHandle(frame, target, i)) {
      throw BridgeError(Code::kInvalidArgument, std::string(target.name) + ": operand " + std::to_string(i) +
                                                    " is an array; a call that gives handles takes handles only");
    }
  }
  ArenaScope scope(call.device());
  Place(target, request, call, results);
  if (HasWork(results)) target.enqueue(request, call, results);
  scope.Keep();
  for (size_t i = 0; i < results.size(); ++i) {
    const bool is_operand = target.is_in_place && i == 0;
    const Handle handle =
        is_operand ? handles.Advance(WordsOf(Argument(frame, 0), "operand 0")) : handles.AddTemporary(results[i]);
    std::memcpy(words[i], handle.data(), sizeof handle);
  }
}

void ServeOn(const Target& target, const Frame& frame, Runtime& runtime) {
  Device& device = runtime.device(frame.ordinal);
  std::lock_guard<std::mutex> lock(device.mutex);
  device.Enter();
  HandleTable& handles = runtime.handles(frame.ordinal);
  Request request(target, ReadOperands(target, frame, handles), ReadAttributes(frame, target));
  std::vector<Tensor> results = target.infer(request);
  NeedResults(frame, target, results.size());
  Call call(runtime, device);
  if (ReadAttribute<int64_t>(frame, target, "is_resident") != 0) {
    GiveHandles(target, frame, request, call, handles, results);
  } else {
    GiveArrays(target, frame, request, call, results);
  }
}

ffi::Error Serve(const Target& target, const Frame& frame) {
  try {
    ServeOn(target, frame, Runtime::Get());
    return ffi::Error::Success();
  } catch (const BridgeError& error) {
    const std::string text = error.what();
    const std::string name = std::string(target.name) + ": ";
    return ffi::Error(static_cast<ffi::ErrorCode>(error.code()), text.rfind(name, 0) == 0 ? text : name + text);
  }
}

}  // namespace
}  // namespace deepinfer::custom_calls

#define DEEPINFER_DEFINE_HANDLER(name)                                                                                 \
  static xla::ffi::Error Handle##name(int32_t ordinal, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,     \
                                      xla::ffi::Dictionary attributes) {                                               \
    return deepinfer::custom_calls::Serve(deepinfer::custom_calls::name##Target(), {ordinal, args, rets, attributes}); \
  }                                                                                                                    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* Deepinfer##name(XLA_FFI_CallFrame*);                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                                       \
      Deepinfer##name, Handle##name,                                                                                   \
      xla::ffi::Ffi::Bind().Ctx<xla::ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs())
#define DEEPINFER_DEFINE_HANDLERS(name) DEEPINFER_DEFINE_HANDLER(name);
DEEPINFER_TARGETS(DEEPINFER_DEFINE_HANDLERS)
