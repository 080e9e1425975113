#include "device.h"

#include <cstddef>
#include <utility>

namespace deepinfer::ascend {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kRecentNames = 32;

}  // namespace

void Arena::Reset(void* base, size_t bytes) {
  base_ = static_cast<char*>(base);
  bytes_ = bytes;
  used_ = 0;
}

void* Arena::Take(size_t bytes) {
  const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (padded > bytes_ - used_) {
    throw BridgeError(Code::kResourceExhausted, "the device arena of " + std::to_string(bytes_) + " bytes has " +
                                                    std::to_string(bytes_ - used_) + " left and " +
                                                    std::to_string(padded) +
                                                    " are needed; end the step, or open the bridge with more "
                                                    "arena_bytes (DEEPINFER_JAX_ASCEND_ARENA)");
  }
  void* address = base_ + used_;
  used_ += padded;
  return address;
}

Device::Device(const Api& api, int32_t ordinal, const DeviceOptions& options, std::string label)
    : api_(api), ordinal_(ordinal), options_(options), label_(std::move(label)) {}

void Device::Enter() {
  if (!dirty_reason_.empty()) {
    throw BridgeError(Code::kFailedPrecondition, label_ + " had a fault and takes no work until reset_device(" +
                                                     std::to_string(ordinal_) + "); the fault was: " + dirty_reason_);
  }
  Check(api_.aclrtSetDevice(ordinal_), "aclrtSetDevice");
  if (!is_started_) Start();
  FreePassed();
}

void Device::Start() {
  Check(api_.aclrtCreateStreamWithConfig(&stream_, 0, 0), "aclrtCreateStreamWithConfig");
  const int32_t status = api_.aclrtMalloc(&arena_base_, options_.arena_bytes, kMallocHugeFirst);
  if (Classify(status).code != Code::kOk) {
    const aclrtStream unused = std::exchange(stream_, nullptr);
    try {
      Check(status, "aclrtMalloc");
    } catch (const BridgeError&) {
      api_.aclrtDestroyStream(unused);
      throw;
    }
  }
  arena_.Reset(arena_base_, options_.arena_bytes);
  is_started_ = true;
}

void Device::Reset() {
  if (dirty_reason_.empty()) dirty_reason_ = "a reset that did not end";
  Check(api_.aclrtSetDevice(ordinal_), "aclrtSetDevice");
  if (is_started_) api_.aclrtStreamAbort(stream_);
  Close();
  Check(api_.aclrtResetDevice(ordinal_), "aclrtResetDevice");
  dirty_reason_.clear();
  recent_.clear();
}

// A fault that waits here was or will be reported elsewhere, and a device with a fault may refuse to take anything back.
// What matters is that nothing runs any more: aclrtResetDevice or aclFinalize, which come next, end the rest.
void Device::Close() {
  if (!is_started_) return;
  is_started_ = false;
  api_.aclrtSynchronizeStreamWithTimeout(stream_, options_.sync_timeout_ms);
  for (const PendingFree& pending : std::exchange(pending_, {})) {
    if (pending.event != nullptr) api_.aclrtDestroyEvent(pending.event);
    api_.aclrtFree(pending.address);
  }
  api_.aclrtFree(std::exchange(arena_base_, nullptr));
  api_.aclrtDestroyStream(std::exchange(stream_, nullptr));
}

std::string Device::RecentText() const {
  std::string text;
  for (const std::string& name : recent_) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "nothing" : text;
}

void Device::Check(int32_t status, const std::string& call) {
  const StatusClass meaning = Classify(status);
  if (meaning.code == Code::kOk) return;
  const char* message = api_.aclGetRecentErrMsg();  // once, on this thread, before any other call
  std::string text = label_ + ": " + call + " failed with status " + std::to_string(status) + ": " +
                     (message == nullptr || *message == '\0' ? "(the library gives no text)" : message);
  if (meaning.dirties_device) {
    dirty_reason_ = text;
    text += "; the device takes no work until reset_device(" + std::to_string(ordinal_) + ")";
  }
  throw BridgeError(meaning.code, text);
}

void Device::Enqueued(const std::string& operation) {
  ++num_enqueued_;
  recent_.push_back(operation);
  if (recent_.size() > kRecentNames) recent_.pop_front();
  if (options_.is_blocking) Synchronize();
}

bool Device::IsLost(uint64_t point) const {
  for (const Span& span : lost_) {
    if (point > span.first && point <= span.last) return true;
  }
  return false;
}

void Device::Synchronize() {
  const int32_t status = api_.aclrtSynchronizeStreamWithTimeout(stream_, options_.sync_timeout_ms);
  const Span waited{std::exchange(num_passed_, num_enqueued_), num_enqueued_};
  if (Classify(status).code == Code::kOk) return;
  lost_.push_back(waited);
  const std::string names = RecentText();
  try {
    Check(status, "waiting for the stream (last enqueued: " + names + ")");
  } catch (const BridgeError&) {
    // Nothing of this stream may touch memory that the caller is about to give up.
    api_.aclrtStreamAbort(stream_);
    throw;
  }
}

void Device::Upload(const Tensor& tensor, const void* host) {
  const size_t bytes = BytesOf(tensor.dtype, tensor.dims);
  if (bytes == 0) return;
  Check(api_.aclrtMemcpyAsync(tensor.address, bytes, host, bytes, static_cast<int32_t>(MemcpyKind::kHostToDevice),
                              stream_),
        "copy to the device");
  Enqueued("copy to the device");
}

void Device::Download(void* host, const Tensor& tensor) {
  const size_t bytes = BytesOf(tensor.dtype, tensor.dims);
  if (bytes == 0) return;
  Check(api_.aclrtMemcpyAsync(host, bytes, tensor.address, bytes, static_cast<int32_t>(MemcpyKind::kDeviceToHost),
                              stream_),
        "copy to the host");
  Enqueued("copy to the host");
}

void Device::Copy(const Tensor& to, const Tensor& from) {
  const size_t bytes = BytesOf(from.dtype, from.dims);
  if (bytes == 0) return;
  Check(api_.aclrtMemcpyAsync(to.address, bytes, from.address, bytes, static_cast<int32_t>(MemcpyKind::kDeviceToDevice),
                              stream_),
        "copy on the device");
  Enqueued("copy on the device");
}

void* Device::Allocate(size_t bytes) {
  void* address = nullptr;
  Check(api_.aclrtMalloc(&address, bytes == 0 ? kAlignment : bytes, kMallocHugeFirst), "aclrtMalloc");
  return address;
}

void Device::Free(void* address) {
  pending_.push_back({address, nullptr, num_enqueued_, false});
  PendingFree& pending = pending_.back();
  Check(api_.aclrtCreateEventExWithFlag(&pending.event, kEventSync), "aclrtCreateEventExWithFlag");
  Check(api_.aclrtRecordEvent(pending.event, stream_), "aclrtRecordEvent");
  pending.is_recorded = true;
  FreePassed();
}

void Device::FreePassed() {
  for (size_t i = 0; i < pending_.size();) {
    if (!HasPassed(pending_[i])) {
      ++i;
      continue;
    }
    LetGo(pending_[i]);  // where that throws, it is tried again next time
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Device::HasPassed(const PendingFree& pending) {
  if (num_passed_ >= pending.last_user) return true;
  if (!pending.is_recorded) return false;
  int32_t state = 0;
  Check(api_.aclrtQueryEventStatus(pending.event, &state), "aclrtQueryEventStatus");
  return state == kEventComplete;
}

void Device::LetGo(PendingFree& pending) {
  pending.last_user = 0;  // it has passed, whatever happens to the event
  if (pending.event != nullptr) Check(api_.aclrtDestroyEvent(pending.event), "aclrtDestroyEvent");
  pending.event = nullptr;
  Check(api_.aclrtFree(pending.address), "aclrtFree");
}

}  // namespace deepinfer::ascend
