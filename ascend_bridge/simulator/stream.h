// Streams and events: a worker thread for each stream, events as counters of what was enqueued before them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace ascend_sim {

// What a queued piece of work gave: 0, or a status and its text.
struct Outcome {
  int32_t status = 0;
  std::optional<std::string> message;
};

struct Range {
  const char* address;
  size_t bytes;
};

struct Task {
  std::string name;
  std::function<Outcome()> run;
  std::vector<Range> ranges;  // device memory that it reads or writes
};

class Stream {
 public:
  Stream(int32_t device, uint64_t seed);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The ticket of the task: `is_done(ticket)` holds once it and all before it are over.
  uint64_t Enqueue(Task task);
  uint64_t last_ticket();
  bool is_done(uint64_t ticket);
  // Waits until everything enqueued is over; the first failure since the last wait, or 107020 after `timeout_ms`.
  Outcome Wait(int32_t timeout_ms);
  // Drops what has not begun, waits for what has, and forgets failures.
  void Abort();
  // The name of a task that is not over and touches the range, or "".
  std::string UserOf(const Range& range);

  int32_t device() const { return device_; }

 private:
  void Work();
  void Pause();

  const int32_t device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool is_running_ = false;
  bool is_ending_ = false;
  uint64_t num_enqueued_ = 0;
  uint64_t num_over_ = 0;
  Outcome failure_;
  std::mt19937_64 random_;
  std::thread worker_;
};

// Extra time before each task, in microseconds: a fixed part and a random one; 0 and 0 is the default.
void SetTiming(int64_t delay_us, int64_t jitter_us);

}  // namespace ascend_sim
