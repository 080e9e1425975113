#include "operator.h"

#include <cstring>

struct aclOpExecutor {
  std::string name;
  std::vector<ascend_sim::Range> ranges;
  std::function<void(const ascend_sim::Memory&)> work;
  uint64_t workspace_bytes;
  bool is_repeatable = false;
};

int64_t aclTensor::count() const { return ascend_sim::CountOf(dims); }

namespace ascend_sim {
namespace {

constexpr int32_t kNullArgument = 161001;
constexpr int32_t kBadParameter = 161002;
constexpr int32_t kTilingError = 561002;
constexpr int32_t kUsedExecutor = 561102;
constexpr int32_t kNdFormat = 2;
constexpr uint64_t kWorkspaceBytes = 1024;
constexpr int kPoison = 0xA5;

int64_t BytesOf(const aclTensor& tensor) { return (tensor.count() * BitsOf(tensor.dtype) + 7) / 8; }

Dims Contiguous(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

bool IsTransposedMatrix(const aclTensor& tensor) {
  return tensor.rank() == 2 && tensor.strides == Dims{1, tensor.dims[0]};
}

// The stored place of each element in the order of the dims.
std::vector<int64_t> Places(const aclTensor& tensor) {
  std::vector<int64_t> places(static_cast<size_t>(tensor.count()));
  const Dims steps = Contiguous(tensor.dims);
  for (size_t i = 0; i < places.size(); ++i) {
    int64_t rest = static_cast<int64_t>(i), place = tensor.offset;
    for (size_t axis = 0; axis < tensor.dims.size(); ++axis) {
      place += rest / steps[axis] * tensor.strides[axis];
      rest %= steps[axis];
    }
    places[i] = place;
  }
  return places;
}

// Poisons the workspace, runs the work and looks whether anybody else wrote into the workspace meanwhile.
Outcome RunGuarded(const aclOpExecutor& executor, Heap& heap, char* workspace) {
  char* bytes = heap.Open(workspace, executor.workspace_bytes);
  if (bytes == nullptr)
    return {kCoreException, "simulator: the workspace of " + executor.name + " is no device memory"};
  std::memset(bytes, kPoison, executor.workspace_bytes);
  try {
    executor.work(Memory(heap));
  } catch (const Refusal& refusal) {
    return {refusal.status, "simulator: " + executor.name + ": " + refusal.text};
  }
  const std::string wanted(executor.workspace_bytes, static_cast<char>(kPoison));
  if (std::memcmp(bytes, wanted.data(), wanted.size()) != 0) {
    State::Get().Violate("the workspace of " + executor.name + " overlaps one of its tensors");
  }
  return {};
}

}  // namespace

int64_t CountOf(const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

std::string DimsText(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

char* Memory::Bytes(const aclTensor& tensor) const {
  char* bytes = heap_.Open(tensor.address, BytesOf(tensor));
  if (bytes == nullptr) throw Refusal{kCoreException, "a tensor of " + DimsText(tensor.dims) + " leaves its memory"};
  return bytes;
}

Values Memory::Load(const aclTensor& tensor) const {
  if (tensor.count() == 0) return {};
  const char* bytes = Bytes(tensor);
  Values values(static_cast<size_t>(tensor.count()));
  if (tensor.strides == Contiguous(tensor.dims)) {
    DecodeRow(tensor.dtype, bytes, tensor.offset, values);
    return values;
  }
  const std::vector<int64_t> places = Places(tensor);
  for (size_t i = 0; i < values.size(); ++i) values[i] = Decode(tensor.dtype, bytes, places[i]);
  return values;
}

void Memory::Store(const aclTensor& tensor, const Values& values) const {
  if (tensor.count() == 0) return;
  char* bytes = Bytes(tensor);
  const std::vector<int64_t> places = Places(tensor);
  for (size_t i = 0; i < places.size(); ++i) Encode(tensor.dtype, bytes, places[i], values[i]);
}

void Plan::NotNull(std::initializer_list<std::pair<const char*, const void*>> arguments) const {
  for (const auto& [what, pointer] : arguments) {
    if (pointer == nullptr) throw Refusal{kNullArgument, std::string(what) + " is null"};
  }
}

void Plan::Type(const char* what, const aclTensor* tensor, std::initializer_list<DataType> allowed) const {
  bool is_allowed = false;
  for (DataType dtype : allowed) is_allowed = is_allowed || tensor->dtype == dtype;
  Require(is_allowed, std::string(what) + " has the type " + NameOf(tensor->dtype));
  Require(tensor->format == kNdFormat, std::string(what) + " has the format " + std::to_string(tensor->format));
  Require(tensor->strides == Contiguous(tensor->dims) || IsTransposedMatrix(*tensor),
          std::string(what) + " is not contiguous");
}

void Plan::Shape(const char* what, const aclTensor* tensor, const Dims& wanted) const {
  Require(tensor->dims == wanted,
          std::string(what) + " has the shape " + DimsText(tensor->dims) + " instead of " + DimsText(wanted));
}

void Plan::Require(bool holds, const std::string& text) const {
  if (!holds) throw Refusal{kBadParameter, text};
}

void Plan::RequireTiling(bool holds, const std::string& text) const {
  if (!holds) throw Refusal{kTilingError, text};
}

void Plan::Attribute(const char* what, double value) { attributes_[what] = value; }

void Plan::Touches(std::initializer_list<const aclTensor*> tensors) {
  for (const aclTensor* tensor : tensors) {
    if (tensor == nullptr || tensor->count() == 0) continue;
    ranges_.push_back({static_cast<const char*>(tensor->address), static_cast<size_t>(BytesOf(*tensor))});
  }
}

aclnnStatus Prepare(const char* name, uint64_t* bytes, aclOpExecutor** executor,
                    const std::function<void(Plan&)>& checks) {
  if (const int32_t planned = Planned(std::string(name) + "GetWorkspaceSize")) return planned;
  if (bytes == nullptr || executor == nullptr) return Fail(kNullArgument, std::string(name) + ": no place for results");
  if (CurrentDevice() < 0) return Fail(kNoContext, "this thread has no device; call aclrtSetDevice first");
  Plan plan(name);
  try {
    checks(plan);
  } catch (const Refusal& refusal) {
    return Fail(refusal.status, std::string(name) + ": " + refusal.text);
  }
  State& state = State::Get();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.attributes[name] = plan.attributes_;
  }
  *bytes = kWorkspaceBytes;
  *executor = new aclOpExecutor{name, plan.ranges_, plan.work_, kWorkspaceBytes};
  state.Add(*executor, Kind::kExecutor);
  return kOk;
}

aclnnStatus Launch(const char* name, void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream pointer) {
  State& state = State::Get();
  if (!state.IsAlive(executor, Kind::kExecutor)) return Fail(kUsedExecutor, std::string(name) + ": a used executor");
  const aclOpExecutor used = *executor;
  if (!used.is_repeatable && state.Remove(executor, Kind::kExecutor)) delete executor;
  if (const int32_t planned = Planned(name)) return planned;
  if (used.name != name) return Fail(kUsedExecutor, std::string(name) + ": the executor is of " + used.name);
  if (workspace == nullptr || bytes < used.workspace_bytes)
    return Fail(kNullArgument, std::string(name) + ": no workspace");
  Stream* stream = state.FindStream(pointer);
  if (stream == nullptr || stream->device() != CurrentDevice()) {
    return Fail(kForeignStream, std::string(name) + ": the stream is not of this thread's device");
  }
  const int32_t device = stream->device();
  const std::optional<Fault> fault = state.faults.Next(name, device, true);
  char* guarded = static_cast<char*>(workspace);
  std::vector<Range> ranges = used.ranges;
  ranges.push_back({guarded, used.workspace_bytes});
  const auto run = [=]() -> Outcome {
    return fault ? Outcome{fault->code, fault->message} : RunGuarded(used, *State::Get().heaps[device], guarded);
  };
  stream->Enqueue({name, run, ranges});
  return kOk;
}

}  // namespace ascend_sim

using namespace ascend_sim;

SIM_EXPORT aclTensor* aclCreateTensor(const int64_t* dims, uint64_t rank, int32_t dtype, const int64_t* strides,
                                      int64_t offset, int32_t format, const int64_t* storage, uint64_t storage_rank,
                                      void* address) {
  if (Planned("aclCreateTensor")) return nullptr;
  auto* tensor = new aclTensor{static_cast<DataType>(dtype),
                               Dims(dims, dims + rank),
                               Dims(strides, strides + rank),
                               offset,
                               format,
                               Dims(storage, storage + storage_rank),
                               address};
  State::Get().Add(tensor, Kind::kTensor);
  return tensor;
}

SIM_EXPORT aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  if (!State::Get().Remove(tensor, Kind::kTensor)) return Fail(kNullArgument, "this is no tensor of its own");
  delete tensor;
  return kOk;
}

SIM_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  if (Planned("aclCreateTensorList")) return nullptr;
  auto* list = new aclTensorList{{tensors, tensors + count}};
  State& state = State::Get();
  for (const aclTensor* tensor : list->members) state.Add(const_cast<aclTensor*>(tensor), Kind::kListedTensor);
  state.Add(list, Kind::kList);
  return list;
}

SIM_EXPORT aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  State& state = State::Get();
  if (!state.Remove(list, Kind::kList)) return Fail(kNullArgument, "this is no tensor list");
  for (const aclTensor* tensor : list->members) {
    if (state.Remove(tensor, Kind::kListedTensor)) delete tensor;
  }
  delete list;
  return kOk;
}

SIM_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  if (Planned("aclCreateIntArray")) return nullptr;
  auto* array = new aclIntArray{{values, values + count}};
  State::Get().Add(array, Kind::kIntArray);
  return array;
}

SIM_EXPORT aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  if (!State::Get().Remove(array, Kind::kIntArray)) return Fail(kNullArgument, "this is no int array");
  delete array;
  return kOk;
}

SIM_EXPORT aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  if (!State::Get().IsAlive(executor, Kind::kExecutor)) return Fail(kUsedExecutor, "this is no live executor");
  executor->is_repeatable = true;
  return kOk;
}

SIM_EXPORT aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  State& state = State::Get();
  if (!state.IsAlive(executor, Kind::kExecutor)) return Fail(kUsedExecutor, "this is no live executor");
  if (!executor->is_repeatable) {
    state.Violate("destroyed by hand an executor that is not repeatable");
    return Fail(kUsedExecutor, "the executor is not repeatable");
  }
  if (state.Remove(executor, Kind::kExecutor)) delete executor;
  return kOk;
}
