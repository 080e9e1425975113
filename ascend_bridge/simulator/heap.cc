#include "heap.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace ascend_sim {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kGap = 512;  // between blocks, so that an overrun leaves its block

}  // namespace

Heap::Heap() {
  const int file = memfd_create("ascend_sim", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kBytes) != 0) throw std::runtime_error("the simulator cannot make its memory file");
  void* device = mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* host = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (device == MAP_FAILED || host == MAP_FAILED) throw std::runtime_error("the simulator cannot map its memory");
  device_ = static_cast<char*>(device);
  host_ = static_cast<char*>(host);
}

Heap::~Heap() {
  munmap(device_, kBytes);
  munmap(host_, kBytes);
}

void* Heap::Allocate(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t start = 0;
  for (const auto& [offset, size] : blocks_) {
    if (start + bytes + kGap <= offset) break;
    start = (offset + size + kGap + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (bytes == 0 || start + bytes > kBytes) return nullptr;
  blocks_[start] = bytes;
  return device_ + start;
}

size_t Heap::Free(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Holds(address)) return 0;
  const auto block = blocks_.find(static_cast<char*>(address) - device_);
  if (block == blocks_.end()) return 0;
  const size_t bytes = block->second;
  blocks_.erase(block);
  return bytes;
}

char* Heap::Open(const void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Holds(address)) return nullptr;
  const size_t offset = static_cast<const char*>(address) - device_;
  auto block = blocks_.upper_bound(offset);
  if (block == blocks_.begin()) return nullptr;
  --block;
  return offset + bytes <= block->first + block->second ? host_ + offset : nullptr;
}

bool Heap::Holds(const void* address) const {
  const char* byte = static_cast<const char*>(address);
  return byte >= device_ && byte < device_ + kBytes;
}

size_t Heap::num_blocks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.size();
}

}  // namespace ascend_sim
