// Device memory of one simulated device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace ascend_sim {

// Memory is mapped twice: the addresses that callers get have no access rights, so that a host access crashes; the
// simulator reads and writes through the second mapping.
class Heap {
 public:
  static constexpr size_t kBytes = size_t{1} << 30;

  Heap();
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // The device address of a fresh block, or nullptr when there is no room.
  void* Allocate(size_t bytes);
  // Bytes of the freed block, or 0 when no block starts there.
  size_t Free(void* address);
  // Where the simulator may touch [address, address + bytes), or nullptr when that is not inside one live block.
  char* Open(const void* address, size_t bytes);
  bool Holds(const void* address) const;
  size_t num_blocks();

 private:
  std::mutex mutex_;
  char* device_ = nullptr;
  char* host_ = nullptr;
  std::map<size_t, size_t> blocks_;  // offset, bytes
};

}  // namespace ascend_sim
