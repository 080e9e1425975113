// The runtime half of the C interface: devices, memory, streams, events.
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "../src/acl_min.h"
#include "state.h"

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SIM_PLANNED(call)                                  \
  if (const int32_t planned = ascend_sim::Planned(call)) { \
    return planned;                                        \
  }

namespace ascend_sim {
namespace {

constexpr int64_t kPhysicalDevices = 8;
constexpr int32_t kHostToDevice = 1;
constexpr int32_t kDeviceToHost = 2;
constexpr int32_t kDeviceToDevice = 3;

// Visible devices by ASCEND_RT_VISIBLE_DEVICES: ids in rising order, cut at the first that is none.
int64_t CountVisible() {
  const char* text = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (text == nullptr) return kPhysicalDevices;
  std::istringstream parts(text);
  std::string part;
  int64_t count = 0, last = -1;
  while (std::getline(parts, part, ',')) {
    const bool is_number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    const int64_t id = is_number ? std::atoll(part.c_str()) : -1;
    if (id <= last || id >= kPhysicalDevices) break;
    last = id;
    ++count;
  }
  return count;
}

Heap* HeapOf(int32_t device) {
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  return device >= 0 && device < static_cast<int32_t>(state.heaps.size()) ? state.heaps[device].get() : nullptr;
}

bool IsDeviceAddress(const void* address) {
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (const auto& heap : state.heaps) {
    if (heap->Holds(address)) return true;
  }
  return false;
}

int32_t NeedContext() {
  return CurrentDevice() < 0 ? Fail(kNoContext, "this thread has no device; call aclrtSetDevice first") : kOk;
}

// The stream, or nullptr with `status` set.
Stream* NeedStream(void* pointer, int32_t& status) {
  status = NeedContext();
  if (status != kOk) return nullptr;
  Stream* stream = State::Get().FindStream(pointer);
  if (stream == nullptr) {
    status = Fail(kBadHandle, "this is no live stream");
  } else if (stream->device() != CurrentDevice()) {
    status = Fail(kForeignStream, "the stream is of another device than this thread's context");
    stream = nullptr;
  }
  return stream;
}

// One side of a copy: opened device memory, or host memory as it is. nullptr when it is on the wrong side.
char* Side(Heap& heap, const void* address, size_t bytes, bool is_on_device) {
  if (is_on_device) return heap.Open(address, bytes);
  return IsDeviceAddress(address) ? nullptr : static_cast<char*>(const_cast<void*>(address));
}

Outcome CopyNow(int32_t device, void* to, const void* from, size_t bytes, int32_t kind) {
  Heap& heap = *HeapOf(device);
  char* target = Side(heap, to, bytes, kind != kDeviceToHost);
  char* source = Side(heap, from, bytes, kind != kHostToDevice);
  if (target == nullptr || source == nullptr) {
    return {kCoreException, "simulator: a copy of " + std::to_string(bytes) + " bytes leaves its memory block"};
  }
  std::memmove(target, source, bytes);
  return {};
}

void DropStreamsOf(int32_t device) {
  State& state = State::Get();
  std::vector<std::unique_ptr<Stream>> dropped;
  std::lock_guard<std::mutex> lock(state.mutex);
  for (auto it = state.streams.begin(); it != state.streams.end();) {
    if (device >= 0 && (*it)->device() != device) {
      ++it;
      continue;
    }
    state.objects.erase(it->get());
    dropped.push_back(std::move(*it));
    it = state.streams.erase(it);
  }
}

void DropEventsOf(int32_t device) {
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (auto it = state.objects.begin(); it != state.objects.end();) {
    const auto* event = it->second == Kind::kEvent ? static_cast<Event*>(it->first) : nullptr;
    if (event == nullptr || event->device != device) {
      ++it;
      continue;
    }
    delete event;
    it = state.objects.erase(it);
  }
}

// What is still alive when the process says goodbye.
void NoteLeaks() {
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (const auto& object : state.objects) state.violations.push_back(std::string("leaked a ") + NameOf(object.second));
  state.objects.clear();
  for (const auto& heap : state.heaps) {
    if (heap->num_blocks() > 0) {
      state.violations.push_back("leaked " + std::to_string(heap->num_blocks()) + " blocks of device memory");
    }
  }
}

}  // namespace
}  // namespace ascend_sim

using namespace ascend_sim;

SIM_EXPORT aclError aclInit(const char*) {
  SIM_PLANNED("aclInit")
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.is_initialised) return Fail(kInitialisedBefore, "initialised before");
  state.is_initialised = true;
  state.determinism = 0;
  if (const char* plan = std::getenv("DEEPINFER_JAX_SIM_FAULTS")) state.faults.Set(ParseFaults(plan));
  for (int64_t i = CountVisible(); i > 0; --i) state.heaps.push_back(std::make_unique<Heap>());
  return kOk;
}

SIM_EXPORT aclError aclFinalize() {
  SIM_PLANNED("aclFinalize")
  DropStreamsOf(-1);
  NoteLeaks();
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.heaps.clear();
  state.is_initialised = false;
  return kOk;
}

SIM_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  SIM_PLANNED("aclrtGetDeviceCount")
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.is_initialised) return Fail(kNotInitialised, "aclInit was not called");
  *count = static_cast<uint32_t>(state.heaps.size());
  return kOk;
}

SIM_EXPORT aclError aclrtSetDevice(int32_t device) {
  SIM_PLANNED("aclrtSetDevice")
  if (HeapOf(device) == nullptr) return Fail(kBadDevice, "there is no device " + std::to_string(device));
  SetCurrentDevice(device);
  return kOk;
}

SIM_EXPORT aclError aclrtResetDevice(int32_t device) {
  SIM_PLANNED("aclrtResetDevice")
  if (HeapOf(device) == nullptr) return Fail(kBadDevice, "there is no device " + std::to_string(device));
  DropStreamsOf(device);
  DropEventsOf(device);
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.heaps[device] = std::make_unique<Heap>();
  return kOk;
}

SIM_EXPORT const char* aclrtGetSocName() { return "SIM_Ascend950"; }

SIM_EXPORT aclError aclsysGetVersionStr(char*, char* out) {
  SIM_PLANNED("aclsysGetVersionStr")
  std::strcpy(out, "9.2");
  return kOk;
}

SIM_EXPORT const char* aclGetRecentErrMsg() { return TakeMessage(); }

SIM_EXPORT aclError aclrtSetSysParamOpt(int32_t option, int64_t value) {
  SIM_PLANNED("aclrtSetSysParamOpt")
  if (option != 0 || value < 0 || value > 3) return Fail(kBadArgument, "only option 0 with a level of 0 to 3 is known");
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.determinism = value;
  return kOk;
}

SIM_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  SIM_PLANNED("aclrtCreateStreamWithConfig")
  if (const int32_t status = NeedContext()) return status;
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.streams.push_back(std::make_unique<Stream>(CurrentDevice(), state.streams.size() + 1));
  *stream = state.streams.back().get();
  state.objects[*stream] = Kind::kStream;
  return kOk;
}

SIM_EXPORT aclError aclrtDestroyStream(aclrtStream pointer) {
  SIM_PLANNED("aclrtDestroyStream")
  int32_t status = kOk;
  const Stream* stream = NeedStream(pointer, status);
  if (stream == nullptr) return status;
  State& state = State::Get();
  std::unique_ptr<Stream> dropped;
  std::lock_guard<std::mutex> lock(state.mutex);
  for (auto it = state.streams.begin(); it != state.streams.end(); ++it) {
    if (it->get() != stream) continue;
    dropped = std::move(*it);
    state.streams.erase(it);
    break;
  }
  state.objects.erase(pointer);
  return kOk;
}

SIM_EXPORT aclError aclrtStreamAbort(aclrtStream pointer) {
  SIM_PLANNED("aclrtStreamAbort")
  int32_t status = kOk;
  Stream* stream = NeedStream(pointer, status);
  if (stream != nullptr) stream->Abort();
  return status;
}

SIM_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream pointer, int32_t timeout_ms) {
  SIM_PLANNED("aclrtSynchronizeStreamWithTimeout")
  int32_t status = kOk;
  Stream* stream = NeedStream(pointer, status);
  return stream == nullptr ? status : Report(stream->Wait(timeout_ms));
}

SIM_EXPORT aclError aclrtMalloc(void** address, size_t bytes, int32_t) {
  SIM_PLANNED("aclrtMalloc")
  if (const int32_t status = NeedContext()) return status;
  *address = HeapOf(CurrentDevice())->Allocate(bytes);
  if (*address == nullptr) return Fail(kOutOfMemory, "no room for " + std::to_string(bytes) + " bytes");
  return kOk;
}

SIM_EXPORT aclError aclrtFree(void* address) {
  SIM_PLANNED("aclrtFree")
  if (const int32_t status = NeedContext()) return status;
  State& state = State::Get();
  const size_t bytes = HeapOf(CurrentDevice())->Free(address);
  if (bytes == 0) {
    state.Violate("freed what is no block of device memory");
    return Fail(kBadArgument, "no block of device memory starts here");
  }
  std::string user;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (const auto& stream : state.streams) {
      if (user.empty()) user = stream->UserOf({static_cast<char*>(address), bytes});
    }
  }
  if (!user.empty()) state.Violate("freed memory that a queued " + user + " still needs");
  return kOk;
}

SIM_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int32_t kind,
                                     aclrtStream pointer) {
  SIM_PLANNED("aclrtMemcpyAsync")
  int32_t status = kOk;
  Stream* stream = NeedStream(pointer, status);
  if (stream == nullptr) return status;
  if (bytes > room) return Fail(kBadArgument, "the target has less room than the copy has bytes");
  if (kind < kHostToDevice || kind > kDeviceToDevice) return Fail(kBadArgument, "an unknown direction of a copy");
  const int32_t device = stream->device();
  const std::optional<Fault> fault = State::Get().faults.Next("aclrtMemcpyAsync", device, true);
  const auto run = [=]() -> Outcome {
    return fault ? Outcome{fault->code, fault->message} : CopyNow(device, to, from, bytes, kind);
  };
  stream->Enqueue({"copy", run, {{static_cast<char*>(to), bytes}, {static_cast<const char*>(from), bytes}}});
  return kOk;
}

SIM_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  SIM_PLANNED("aclrtCreateEventExWithFlag")
  if (const int32_t status = NeedContext()) return status;
  *event = new Event{CurrentDevice()};
  State::Get().Add(*event, Kind::kEvent);
  return kOk;
}

SIM_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  SIM_PLANNED("aclrtDestroyEvent")
  if (!State::Get().Remove(event, Kind::kEvent)) return Fail(kBadHandle, "this is no live event");
  delete static_cast<Event*>(event);
  return kOk;
}

SIM_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream pointer) {
  SIM_PLANNED("aclrtRecordEvent")
  int32_t status = kOk;
  Stream* stream = NeedStream(pointer, status);
  if (stream == nullptr) return status;
  *static_cast<Event*>(event) = {stream->device(), stream, stream->last_ticket()};
  return kOk;
}

SIM_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, int32_t* state) {
  SIM_PLANNED("aclrtQueryEventStatus")
  const Event& recorded = *static_cast<Event*>(event);
  const bool is_over = recorded.stream == nullptr || State::Get().FindStream(recorded.stream) == nullptr ||
                       recorded.stream->is_done(recorded.ticket);
  *state = is_over ? 1 : 0;
  return kOk;
}
