// Groups of devices that do collectives together.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "errors.h"
#include "loader.h"

namespace deepinfer::ascend {

struct Communicator {
  HcclComm comm;
  int64_t size;
};

// A family of groups divides devices along one axis of a mesh: a device is in one group of a family at most.
class Groups {
 public:
  explicit Groups(Libraries& libraries) : libraries_(libraries) {}
  ~Groups();
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;

  // Makes a communicator for each device of each group; ranks follow the order of a group. Returns the family's number.
  // To be called on one thread before any program runs.
  int64_t Add(const std::vector<std::vector<int32_t>>& groups);
  // The communicator of a device; throws INVALID_ARGUMENT when the device is in no group of the family.
  Communicator Find(int64_t family, int32_t ordinal);

 private:
  struct Member {
    int32_t ordinal;
    Communicator communicator;
  };

  void Connect(const std::vector<int32_t>& group, std::vector<Member>& members);

  Libraries& libraries_;
  std::mutex mutex_;
  std::vector<std::vector<Member>> families_;
};

// Throws what a result of the library of collectives means.
void CheckCollective(int32_t result, const std::string& call);

}  // namespace deepinfer::ascend
