// In-process collectives: the streams of all ranks meet, read each other's memory, and reduce in the order of ranks.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <optional>
#include <string>

#include "operator.h"

using namespace ascend_sim;

namespace {

constexpr int32_t kBadParameter = 1;
constexpr int32_t kInternal = 4;
// What a wait reports when a rank does not come; our choice among the time-outs.
constexpr int32_t kNotReached = 207020;

std::atomic<int64_t> timeout_ms{60000};

// What one rank brings to a meeting.
struct Offer {
  std::string what;  // operation, count and type; all ranks must bring the same
  const char* data;
};

// Where the ranks of a group meet: everybody waits until all have come, twice for each collective.
class Meeting {
 public:
  explicit Meeting(size_t size) : offers_(size) {}

  // False after a time-out.
  bool Arrive(size_t rank, const Offer& offer) {
    std::unique_lock<std::mutex> lock(mutex_);
    offers_[rank] = offer;
    return WaitForAll(lock);
  }
  bool Leave() {
    std::unique_lock<std::mutex> lock(mutex_);
    return WaitForAll(lock);
  }
  // The offers between arriving and leaving, when nobody changes them.
  const std::vector<Offer>& offers() const { return offers_; }

 private:
  bool WaitForAll(std::unique_lock<std::mutex>& lock) {
    const uint64_t round = num_rounds_;
    if (++num_waiting_ == offers_.size()) {
      num_waiting_ = 0;
      ++num_rounds_;
      changed_.notify_all();
      return true;
    }
    if (changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return num_rounds_ != round; }))
      return true;
    --num_waiting_;
    return false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Offer> offers_;
  size_t num_waiting_ = 0;
  uint64_t num_rounds_ = 0;
};

struct Rank {
  std::shared_ptr<Meeting> meeting;
  size_t rank;
  size_t size;
  int32_t device;
};

DataType TypeOf(int32_t hccl_type) {
  switch (hccl_type) {
    case 2:
      return DataType::kInt32;
    case 4:
      return DataType::kFloat;
    case 11:
      return DataType::kBf16;
    default:
      return DataType::kHifloat8;  // none that the simulator computes with
  }
}

struct Collective {
  std::string name;
  const char* send;
  char* recv;
  uint64_t send_count;
  uint64_t recv_count;
  DataType dtype;
  bool is_sum;
};

uint64_t BytesOf(const Collective& work, uint64_t count) {
  return count * static_cast<uint64_t>(BitsOf(work.dtype)) / 8;
}

// The received values, in float64: sums over ranks of the elements from `first` on, or all ranks' elements in turn.
Values Received(const Collective& work, const std::vector<Offer>& offers, uint64_t first) {
  Values values;
  if (!work.is_sum) {
    for (const Offer& offer : offers) {
      for (uint64_t i = 0; i < work.send_count; ++i) values.push_back(Decode(work.dtype, offer.data, i));
    }
    return values;
  }
  for (uint64_t i = first; i < first + work.recv_count; ++i) {
    double sum = 0;
    for (const Offer& offer : offers) sum += Decode(work.dtype, offer.data, static_cast<int64_t>(i));
    values.push_back(sum);
  }
  return values;
}

Outcome Meet(const Collective& work, const Rank& rank) {
  Heap& heap = *State::Get().heaps[rank.device];
  const char* send = heap.Open(work.send, BytesOf(work, work.send_count));
  char* recv = heap.Open(work.recv, BytesOf(work, work.recv_count));
  if (send == nullptr || recv == nullptr) return {kCoreException, "simulator: " + work.name + " leaves its memory"};
  const std::string what = work.name + " of " + std::to_string(work.send_count) + " " + NameOf(work.dtype);
  const Outcome late{kNotReached, "simulator: " + what + ": a rank did not come (HCCL time-out, 9)"};
  if (!rank.meeting->Arrive(rank.rank, {what, send})) return late;
  Outcome outcome;
  for (const Offer& offer : rank.meeting->offers()) {
    if (offer.what != what) outcome = {kCoreException, "simulator: " + what + " met " + offer.what};
  }
  Values values;
  if (outcome.status == kOk) {
    const uint64_t first = work.send_count == work.recv_count ? 0 : rank.rank * work.recv_count;
    values = Received(work, rank.meeting->offers(), first);
  }
  if (!rank.meeting->Leave()) return late;
  for (size_t i = 0; i < values.size(); ++i) Encode(work.dtype, recv, static_cast<int64_t>(i), values[i]);
  return outcome;
}

HcclResult EnqueueCollective(const Collective& work, HcclComm comm, aclrtStream pointer) {
  State& state = State::Get();
  Stream* stream = state.FindStream(pointer);
  if (!state.IsAlive(comm, Kind::kCommunicator) || stream == nullptr) return kBadParameter;
  const Rank rank = *static_cast<Rank*>(comm);
  if (BitsOf(work.dtype) == 0 || rank.device != stream->device() || CurrentDevice() != rank.device)
    return kBadParameter;
  const std::optional<Fault> fault = state.faults.Next(work.name, rank.device, true);
  stream->Enqueue({work.name,
                   [=] { return fault ? Outcome{fault->code, fault->message} : Meet(work, rank); },
                   {{work.send, BytesOf(work, work.send_count)}, {work.recv, BytesOf(work, work.recv_count)}}});
  return kOk;
}

}  // namespace

// How long a rank waits for the others.
SIM_EXPORT void sim_set_collective_timeout(int64_t milliseconds) { timeout_ms = milliseconds; }

SIM_EXPORT HcclResult HcclCommInitAll(uint32_t count, int32_t* devices, HcclComm* comms) {
  if (const int32_t planned = Planned("HcclCommInitAll")) return planned;
  if (count == 0) return kBadParameter;
  const auto meeting = std::make_shared<Meeting>(count);
  for (uint32_t rank = 0; rank < count; ++rank) {
    comms[rank] = new Rank{meeting, rank, count, devices[rank]};
    State::Get().Add(comms[rank], Kind::kCommunicator);
  }
  return kOk;
}

SIM_EXPORT HcclResult HcclCommDestroy(HcclComm comm) {
  if (!State::Get().Remove(comm, Kind::kCommunicator)) return kInternal;
  delete static_cast<Rank*>(comm);
  return kOk;
}

SIM_EXPORT HcclResult HcclAllReduce(void* send, void* recv, uint64_t count, int32_t type, int32_t op, HcclComm comm,
                                    aclrtStream stream) {
  if (const int32_t planned = Planned("HcclAllReduce")) return planned;
  if (op != 0) return kBadParameter;
  return EnqueueCollective(
      {"HcclAllReduce", static_cast<char*>(send), static_cast<char*>(recv), count, count, TypeOf(type), true}, comm,
      stream);
}

SIM_EXPORT HcclResult HcclAllGather(void* send, void* recv, uint64_t count, int32_t type, HcclComm comm,
                                    aclrtStream stream) {
  if (const int32_t planned = Planned("HcclAllGather")) return planned;
  if (!State::Get().IsAlive(comm, Kind::kCommunicator)) return kBadParameter;
  const uint64_t received = count * static_cast<Rank*>(comm)->size;
  return EnqueueCollective(
      {"HcclAllGather", static_cast<char*>(send), static_cast<char*>(recv), count, received, TypeOf(type), false}, comm,
      stream);
}

SIM_EXPORT HcclResult HcclReduceScatter(void* send, void* recv, uint64_t count, int32_t type, int32_t op, HcclComm comm,
                                        aclrtStream stream) {
  if (const int32_t planned = Planned("HcclReduceScatter")) return planned;
  if (op != 0 || !State::Get().IsAlive(comm, Kind::kCommunicator)) return kBadParameter;
  const uint64_t sent = count * static_cast<Rank*>(comm)->size;
  return EnqueueCollective(
      {"HcclReduceScatter", static_cast<char*>(send), static_cast<char*>(recv), sent, count, TypeOf(type), true}, comm,
      stream);
}
