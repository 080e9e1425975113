// Handles: eight 32-bit words that stand for a device tensor inside a jitted program (spec: ascend 7).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "device.h"
#include "tensor.h"

namespace deepinfer::ascend {

inline constexpr size_t kHandleWords = 8;
using Handle = std::array<uint32_t, kHandleWords>;  // magic, ordinal, slot, generation, dtype, bytes low, high, check

// The tensors of one device that handles name. Used with the device's mutex held.
class HandleTable {
 public:
  explicit HandleTable(Device& device);

  // A tensor in the arena; it is gone at `EndStep`.
  Handle AddTemporary(const Tensor& tensor);
  // A tensor with memory of its own, until `Release`.
  Handle AddOwned(const Tensor& tensor);
  // The tensor of a handle. Throws INVALID_ARGUMENT for words that are no handle of this process and device,
  // FAILED_PRECONDITION "stale device handle" for one that was consumed, released or reset, and "lost device tensor"
  // for one whose making or writing may have been dropped after a failure.
  const Tensor& Get(const uint32_t* words) const;
  // Consumes the handle: its tensor was written in place. Returns the one that is valid now.
  Handle Advance(const uint32_t* words);
  // Frees an owned tensor in stream order.
  void Release(const uint32_t* words);
  // Drops all temporaries and rewinds the arena.
  void EndStep();
  // Frees every owned tensor in stream order and drops the rest, before the device is closed.
  void ReleaseAll();
  // Drops everything after a reset of the device, whose memory is gone.
  void Forget();

  int64_t num_live() const;

 private:
  struct Slot {
    Tensor tensor;
    uint32_t generation = 1;
    uint64_t written_at = 0;  // the device's count of work just after the tensor was made or written
    bool is_live = false;
    bool is_owned = false;
  };

  Handle Add(const Tensor& tensor, bool is_owned);
  Handle WordsOf(uint32_t index) const;
  uint32_t IndexOf(const uint32_t* words) const;
  void Drop(Slot& slot);

  Device& device_;
  const uint32_t number_;  // among all tables of the process
  std::vector<Slot> slots_;
};

}  // namespace deepinfer::ascend
