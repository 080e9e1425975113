#include "stream.h"

#include <atomic>
#include <chrono>
#include <utility>

namespace ascend_sim {
namespace {

constexpr int32_t kStreamTimeout = 107020;

std::atomic<int64_t> delay_us{0};
std::atomic<int64_t> jitter_us{0};

bool Overlaps(const Range& a, const Range& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

}  // namespace

void SetTiming(int64_t delay, int64_t jitter) {
  delay_us = delay;
  jitter_us = jitter;
}

Stream::Stream(int32_t device, uint64_t seed) : device_(device), random_(seed), worker_([this] { Work(); }) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

uint64_t Stream::Enqueue(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  changed_.notify_all();
  return ++num_enqueued_;
}

uint64_t Stream::last_ticket() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_enqueued_;
}

bool Stream::is_done(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_over_ >= ticket;
}

Outcome Stream::Wait(int32_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_idle = [this] { return num_over_ == num_enqueued_; };
  if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_idle)) {
    return {kStreamTimeout, "simulator: the stream did not become idle in " + std::to_string(timeout_ms) + " ms"};
  }
  return std::exchange(failure_, {});
}

void Stream::Abort() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (const size_t num_kept = is_running_ ? 1 : 0; queue_.size() > num_kept; ++num_over_) queue_.pop_back();
  changed_.wait(lock, [this] { return !is_running_; });
  failure_ = {};
}

std::string Stream::UserOf(const Range& range) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Task& task : queue_) {
    for (const Range& used : task.ranges) {
      if (Overlaps(used, range)) return task.name;
    }
  }
  return "";
}

void Stream::Pause() {
  int64_t wait_us = delay_us;
  if (jitter_us > 0) wait_us += static_cast<int64_t>(random_() % static_cast<uint64_t>(jitter_us + 1));
  if (wait_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
}

// A task stays at the front of the queue while it runs, so that `UserOf` finds it; after a failure, the tasks behind it
// are passed over until somebody waits.
void Stream::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    is_running_ = true;
    const Task task = queue_.front();
    const bool is_skipped = failure_.status != 0;
    lock.unlock();
    Outcome outcome;
    if (!is_skipped) {
      Pause();
      outcome = task.run();
    }
    lock.lock();
    is_running_ = false;
    queue_.pop_front();
    ++num_over_;
    if (outcome.status != 0 && failure_.status == 0) failure_ = outcome;
    changed_.notify_all();
  }
}

}  // namespace ascend_sim
