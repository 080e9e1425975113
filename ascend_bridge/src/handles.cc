#include "handles.h"

#include <unistd.h>

#include <atomic>
#include <string>

namespace deepinfer::ascend {
namespace {

constexpr uint32_t kMagic = 0x41534E44;  // "ASND"

// Tables made so far in this process: handles of a bridge that was closed are none of the next one's.
std::atomic<uint32_t> num_tables{0};

uint32_t CheckWord(const uint32_t* words, uint32_t table) {
  uint32_t hash = 2166136261u ^ static_cast<uint32_t>(getpid()) ^ table * 2654435769u;
  for (size_t i = 0; i + 1 < kHandleWords; ++i) hash = (hash ^ words[i]) * 16777619u;
  return hash;
}

[[noreturn]] void RefuseWords(const std::string& why) {
  throw BridgeError(Code::kInvalidArgument,
                    "these words are no device handle: " + why +
                        "; handles come from put() and from resident operators of this process, and no arithmetic "
                        "may touch them");
}

}  // namespace

HandleTable::HandleTable(Device& device) : device_(device), number_(++num_tables) {}

Handle HandleTable::AddTemporary(const Tensor& tensor) { return Add(tensor, false); }

Handle HandleTable::AddOwned(const Tensor& tensor) { return Add(tensor, true); }

Handle HandleTable::Add(const Tensor& tensor, bool is_owned) {
  uint32_t index = 0;
  while (index < slots_.size() && slots_[index].is_live) ++index;
  if (index == slots_.size()) slots_.emplace_back();
  slots_[index].tensor = tensor;
  slots_[index].is_live = true;
  slots_[index].is_owned = is_owned;
  slots_[index].written_at = device_.num_enqueued();
  return WordsOf(index);
}

Handle HandleTable::WordsOf(uint32_t index) const {
  const Slot& slot = slots_[index];
  const auto bytes = static_cast<uint64_t>(BytesOf(slot.tensor.dtype, slot.tensor.dims));
  Handle words = {kMagic,
                  static_cast<uint32_t>(device_.ordinal()),
                  index,
                  slot.generation,
                  static_cast<uint32_t>(slot.tensor.dtype),
                  static_cast<uint32_t>(bytes),
                  static_cast<uint32_t>(bytes >> 32),
                  0};
  words[kHandleWords - 1] = CheckWord(words.data(), number_);
  return words;
}

uint32_t HandleTable::IndexOf(const uint32_t* words) const {
  if (words[0] != kMagic) RefuseWords("the first one is not the magic number");
  if (words[1] != static_cast<uint32_t>(device_.ordinal())) {
    RefuseWords("the tensor is on device " + std::to_string(words[1]) + ", and this call runs on device " +
                std::to_string(device_.ordinal()));
  }
  if (words[kHandleWords - 1] != CheckWord(words, number_)) RefuseWords("the check word does not match");
  const uint32_t index = words[2];
  if (index >= slots_.size() || !slots_[index].is_live || slots_[index].generation != words[3]) {
    throw BridgeError(Code::kFailedPrecondition,
                      "stale device handle: generation " + std::to_string(words[3]) + " of slot " +
                          std::to_string(index) +
                          " was written in place, released, or ended with its step; use the handle that the last "
                          "write returned");
  }
  return index;
}

const Tensor& HandleTable::Get(const uint32_t* words) const {
  const Slot& slot = slots_[IndexOf(words)];
  if (device_.IsLost(slot.written_at)) {
    throw BridgeError(Code::kFailedPrecondition,
                      "lost device tensor: work that was enqueued with the one that made or wrote it failed, and the "
                      "rest was dropped; make it again");
  }
  return slot.tensor;
}

Handle HandleTable::Advance(const uint32_t* words) {
  const uint32_t index = IndexOf(words);
  ++slots_[index].generation;
  slots_[index].written_at = device_.num_enqueued();
  return WordsOf(index);
}

void HandleTable::Drop(Slot& slot) {
  slot.is_live = false;
  ++slot.generation;
}

void HandleTable::Release(const uint32_t* words) {
  Slot& slot = slots_[IndexOf(words)];
  if (!slot.is_owned) {
    throw BridgeError(Code::kFailedPrecondition, "a temporary of a step is released by end_step(), not by itself");
  }
  Drop(slot);
  device_.Free(slot.tensor.address);
}

void HandleTable::EndStep() {
  for (Slot& slot : slots_) {
    if (slot.is_live && !slot.is_owned) Drop(slot);
  }
  device_.arena().Rewind(0);
}

void HandleTable::ReleaseAll() {
  for (Slot& slot : slots_) {
    if (!slot.is_live) continue;
    Drop(slot);
    if (!slot.is_owned) continue;
    try {
      device_.Free(slot.tensor.address);
    } catch (const BridgeError&) {
      // The device keeps it in mind; the others are let go of all the same.
    }
  }
}

void HandleTable::Forget() {
  for (Slot& slot : slots_) {
    if (slot.is_live) Drop(slot);
  }
}

int64_t HandleTable::num_live() const {
  int64_t count = 0;
  for (const Slot& slot : slots_) count += slot.is_live ? 1 : 0;
  return count;
}

}  // namespace deepinfer::ascend
