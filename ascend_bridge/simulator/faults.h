// The fault plan: which call fails, when, and how (spec: ascend 9).
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ascend_sim {

struct Fault {
  std::string call = "*";
  int64_t nth = 1;  // the first matching call is 1
  int32_t code = 0;
  std::optional<std::string> message;
  bool is_async = false;  // found by a later synchronisation
  int64_t device = -1;    // -1: any
  int64_t num_seen = 0;
};

// Reads `[{"call": "aclrtMalloc", "nth": 2, "code": 207001, "message": null, "when": "call", "device": 0}, ...]`.
// Throws std::invalid_argument with the place and what was expected.
std::vector<Fault> ParseFaults(const std::string& text);

class FaultPlan {
 public:
  void Set(std::vector<Fault> faults);
  // The fault that this call runs into, counting the call.
  std::optional<Fault> Next(const std::string& call, int32_t device, bool is_async);
  // Begins to note every call that could run into a fault, in order, and forgets those noted before.
  void Record();
  std::vector<std::pair<std::string, bool>> recorded();  // name, and whether it is the asynchronous part

 private:
  std::mutex mutex_;
  std::vector<Fault> faults_;
  bool is_recording_ = false;
  std::vector<std::pair<std::string, bool>> recorded_;
};

}  // namespace ascend_sim
