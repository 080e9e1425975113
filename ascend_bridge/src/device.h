// One device: its context, main stream, arena and the tensors that handles name.
#pragma once

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "loader.h"
#include "tensor.h"

namespace deepinfer::ascend {

struct DeviceOptions {
  size_t arena_bytes = 0;
  int32_t sync_timeout_ms = 600000;
  bool is_blocking = false;  // wait after each operator
};

// Device memory that is handed out front to back and taken back all at once. Its size never changes.
class Arena {
 public:
  void Reset(void* base, size_t bytes);
  // Memory of at least `bytes` bytes; throws RESOURCE_EXHAUSTED when the arena has less left.
  void* Take(size_t bytes);
  size_t mark() const { return used_; }
  void Rewind(size_t mark) { used_ = mark; }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
};

// Every member but `mutex` is called with the mutex held, after `Enter` on the same thread.
class Device {
 public:
  Device(const Api& api, int32_t ordinal, const DeviceOptions& options, std::string label);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  std::mutex mutex;

  // Makes this thread's context the device's, starts the device at the first call, and refuses a dirty device.
  void Enter();
  // Drops all work and memory, makes every handle stale, and starts anew; the way out of the dirty state. A reset that
  // fails leaves the device dirty.
  void Reset();
  // Gives memory, stream and events back; the destructor of a started device needs it to have been called.
  void Close();

  // Throws for a status that is no success: with the text of the library, and marks the device dirty where that is due.
  void Check(int32_t status, const std::string& call);
  // Notes a name for error texts, and waits when the device is blocking.
  void Enqueued(const std::string& operation);
  // How many names were noted: a point in the order of work.
  uint64_t num_enqueued() const { return num_enqueued_; }
  // True when work up to this point, and not passed before, was dropped by a wait that failed.
  bool IsLost(uint64_t point) const;
  // Waits for the stream; reports a fault of anything enqueued so far, and drops what has not run.
  void Synchronize();

  void Upload(const Tensor& tensor, const void* host);
  void Download(void* host, const Tensor& tensor);
  void Copy(const Tensor& to, const Tensor& from);

  // Memory that outlives steps. `Free` lets go of it once the stream has passed everything enqueued so far, also where
  // it throws.
  void* Allocate(size_t bytes);
  void Free(void* address);

  const Api& api() const { return api_; }
  aclrtStream stream() const { return stream_; }
  Arena& arena() { return arena_; }
  int32_t ordinal() const { return ordinal_; }
  bool is_started() const { return is_started_; }

 private:
  // Work behind `first`, up to and with `last`.
  struct Span {
    uint64_t first;
    uint64_t last;
  };

  struct PendingFree {
    void* address;
    aclrtEvent event;    // nullptr: there is none, and a wait has to pass
    uint64_t last_user;  // `num_enqueued` when it was let go of
    bool is_recorded;    // whether the event stands behind the last user
  };

  void Start();
  void FreePassed();
  bool HasPassed(const PendingFree& pending);
  void LetGo(PendingFree& pending);
  std::string RecentText() const;

  const Api& api_;
  const int32_t ordinal_;
  const DeviceOptions options_;
  const std::string label_;  // how texts name the device: "Ascend device 0" or "Ascend simulator device 0"
  bool is_started_ = false;
  std::string dirty_reason_;
  aclrtStream stream_ = nullptr;
  void* arena_base_ = nullptr;
  Arena arena_;
  std::deque<std::string> recent_;
  uint64_t num_enqueued_ = 0;
  uint64_t num_passed_ = 0;  // enqueued before the last wait that ended, well or not
  std::vector<Span> lost_;
  std::vector<PendingFree> pending_;
};

}  // namespace deepinfer::ascend
