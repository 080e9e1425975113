// What the simulator as a whole remembers: devices, live objects, violations, attributes that it was given.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "faults.h"
#include "heap.h"
#include "stream.h"

namespace ascend_sim {

inline constexpr int32_t kOk = 0;
inline constexpr int32_t kBadArgument = 107000;
inline constexpr int32_t kBadDevice = 107001;
inline constexpr int32_t kNoContext = 107002;
inline constexpr int32_t kForeignStream = 107003;
inline constexpr int32_t kBadHandle = 107017;
inline constexpr int32_t kNotInitialised = 100001;
inline constexpr int32_t kInitialisedBefore = 100002;
inline constexpr int32_t kOutOfMemory = 207001;
inline constexpr int32_t kCoreException = 507015;

struct Event {
  int32_t device;
  Stream* stream = nullptr;
  uint64_t ticket = 0;
};

// The kinds of objects whose life is counted.
enum class Kind { kTensor, kListedTensor, kList, kIntArray, kExecutor, kStream, kEvent, kCommunicator };
const char* NameOf(Kind kind);

class State {
 public:
  static State& Get();

  std::mutex mutex;  // over all members below, except where they lock themselves
  bool is_initialised = false;
  std::vector<std::unique_ptr<Heap>> heaps;  // one for each visible device
  std::map<void*, Kind> objects;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::string> violations;
  std::map<std::string, std::map<std::string, double>> attributes;  // operator: what its last first phase received
  int64_t determinism = 0;
  FaultPlan faults;

  void Add(void* object, Kind kind);
  // Forgets the object; false, and a violation, when it is not alive or of another kind.
  bool Remove(const void* object, Kind kind);
  bool IsAlive(const void* object, Kind kind);
  void Violate(const std::string& text);
  // The live stream behind a pointer, or nullptr.
  Stream* FindStream(const void* stream);
};

// The device of this thread's context, -1 for none.
int32_t CurrentDevice();
void SetCurrentDevice(int32_t device);
// Sets the text for this thread's next aclGetRecentErrMsg and returns the status.
int32_t Fail(int32_t status, const std::string& message);
int32_t Report(const Outcome& outcome);
// A planned failure of this call, else 0. Every exported function begins with it.
int32_t Planned(const std::string& call);
// Takes the text that `Fail` left; nullptr when there is none.
const char* TakeMessage();

}  // namespace ascend_sim
