#include "state.h"

#include <optional>

namespace ascend_sim {
namespace {

thread_local int32_t current_device = -1;
thread_local std::optional<std::string> recent_message;
thread_local std::string handed_out;

}  // namespace

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kTensor:
      return "tensor";
    case Kind::kListedTensor:
      return "listed tensor";
    case Kind::kList:
      return "tensor list";
    case Kind::kIntArray:
      return "int array";
    case Kind::kExecutor:
      return "executor";
    case Kind::kStream:
      return "stream";
    case Kind::kEvent:
      return "event";
    case Kind::kCommunicator:
      return "communicator";
  }
  return "object";
}

State& State::Get() {
  static State* const state = new State;  // never destroyed: worker threads may outlive static storage
  return *state;
}

void State::Add(void* object, Kind kind) {
  std::lock_guard<std::mutex> lock(mutex);
  objects[object] = kind;
}

bool State::Remove(const void* object, Kind kind) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = objects.find(const_cast<void*>(object));
  if (found == objects.end() || found->second != kind) {
    const std::string is_now = found == objects.end() ? "not alive" : std::string("a ") + NameOf(found->second);
    violations.push_back(std::string("destroyed as a ") + NameOf(kind) + " what is " + is_now);
    return false;
  }
  objects.erase(found);
  return true;
}

bool State::IsAlive(const void* object, Kind kind) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = objects.find(const_cast<void*>(object));
  return found != objects.end() && found->second == kind;
}

void State::Violate(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  violations.push_back(text);
}

Stream* State::FindStream(const void* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& known : streams) {
    if (known.get() == stream) return known.get();
  }
  return nullptr;
}

int32_t CurrentDevice() { return current_device; }

void SetCurrentDevice(int32_t device) { current_device = device; }

int32_t Fail(int32_t status, const std::string& message) {
  recent_message = "simulator: " + message;
  return status;
}

int32_t Report(const Outcome& outcome) {
  recent_message = outcome.message;
  return outcome.status;
}

int32_t Planned(const std::string& call) {
  const std::optional<Fault> fault = State::Get().faults.Next(call, current_device, false);
  if (!fault) return kOk;
  recent_message = fault->message;
  return fault->code;
}

const char* TakeMessage() {
  if (!recent_message) return nullptr;
  handed_out = *recent_message;
  recent_message.reset();
  return handed_out.c_str();
}

}  // namespace ascend_sim
