#include "groups.h"

#include <set>
#include <utility>

namespace deepinfer::ascend {

void CheckCollective(int32_t result, const std::string& call) {
  const Code code = ClassifyCollective(result);
  if (code != Code::kOk) throw BridgeError(code, call + " failed with result " + std::to_string(result) + " of HCCL");
}

Groups::~Groups() {
  for (const std::vector<Member>& members : families_) {
    for (const Member& member : members) libraries_.collectives().HcclCommDestroy(member.communicator.comm);
  }
}

int64_t Groups::Add(const std::vector<std::vector<int32_t>>& groups) {
  std::set<int32_t> seen;
  for (const std::vector<int32_t>& group : groups) {
    for (int32_t ordinal : group) {
      if (seen.insert(ordinal).second) continue;
      throw BridgeError(Code::kInvalidArgument,
                        "device " + std::to_string(ordinal) + " is in two places of the groups");
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Member> members;
  try {
    for (const std::vector<int32_t>& group : groups) Connect(group, members);
  } catch (const BridgeError&) {
    for (const Member& member : members) libraries_.collectives().HcclCommDestroy(member.communicator.comm);
    throw;
  }
  families_.push_back(std::move(members));
  return static_cast<int64_t>(families_.size()) - 1;
}

void Groups::Connect(const std::vector<int32_t>& group, std::vector<Member>& members) {
  std::vector<int32_t> devices = group;
  std::vector<HcclComm> comms(devices.size(), nullptr);
  CheckCollective(
      libraries_.collectives().HcclCommInitAll(static_cast<uint32_t>(devices.size()), devices.data(), comms.data()),
      "HcclCommInitAll");
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    members.push_back({devices[rank], {comms[rank], static_cast<int64_t>(devices.size())}});
  }
}

Communicator Groups::Find(int64_t family, int32_t ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (family >= 0 && family < static_cast<int64_t>(families_.size())) {
    for (const Member& member : families_[family]) {
      if (member.ordinal == ordinal) return member.communicator;
    }
  }
  throw BridgeError(Code::kInvalidArgument, "device " + std::to_string(ordinal) + " is in no group of family " +
                                                std::to_string(family) + "; make the groups with make_groups()");
}

}  // namespace deepinfer::ascend
