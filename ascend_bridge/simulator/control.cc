// What tests ask of the simulator: faults, timing, violations, counters, received attributes. Texts are JSON and stay
// valid until the next call of the same function on the same thread.
#include <cstdio>
#include <map>
#include <stdexcept>

#include "operator.h"

using namespace ascend_sim;

namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return quoted + "\"";
}

std::string Exact(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%a", value);
  return text;
}

template <class Map, class Print>
std::string JsonObject(const Map& map, Print print) {
  std::string text = "{";
  for (const auto& [key, value] : map) text += (text.size() > 1 ? ", " : "") + Quoted(key) + ": " + print(value);
  return text + "}";
}

}  // namespace

// 0, or -1 with the reason in aclGetRecentErrMsg.
SIM_EXPORT int32_t sim_set_faults(const char* json) {
  try {
    State::Get().faults.Set(ParseFaults(json));
  } catch (const std::invalid_argument& error) {
    return Fail(-1, error.what());
  }
  return kOk;
}

// From here on every call is noted in which a fault can be planned; `sim_calls` gives them and ends that.
SIM_EXPORT void sim_record_calls() { State::Get().faults.Record(); }

// [["aclrtMemcpyAsync", "call"], ["aclrtMemcpyAsync", "async"], ...] in order.
SIM_EXPORT const char* sim_calls() {
  thread_local std::string text;
  text = "[";
  for (const auto& [call, is_async] : State::Get().faults.recorded()) {
    text += (text.size() > 1 ? ", [" : "[") + Quoted(call) + (is_async ? ", \"async\"]" : ", \"call\"]");
  }
  text += "]";
  return text.c_str();
}

SIM_EXPORT void sim_set_timing(int64_t delay_us, int64_t jitter_us) { SetTiming(delay_us, jitter_us); }

SIM_EXPORT const char* sim_violations() {
  thread_local std::string text;
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  text = "[";
  for (const std::string& violation : state.violations) text += (text.size() > 1 ? ", " : "") + Quoted(violation);
  text += "]";
  return text.c_str();
}

SIM_EXPORT void sim_clear_violations() {
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.violations.clear();
}

// Live objects by kind, and blocks of device memory.
SIM_EXPORT const char* sim_counters() {
  thread_local std::string text;
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  std::map<std::string, int64_t> counts;
  for (const auto& object : state.objects) ++counts[NameOf(object.second)];
  for (const auto& heap : state.heaps) counts["memory block"] += static_cast<int64_t>(heap->num_blocks());
  counts["determinism level"] = state.determinism;
  text = JsonObject(counts, [](int64_t count) { return std::to_string(count); });
  return text.c_str();
}

// The attributes of the operator's last first phase, as hexadecimal float64 texts.
SIM_EXPORT const char* sim_attributes(const char* name) {
  thread_local std::string text;
  State& state = State::Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  text = JsonObject(state.attributes[name], [](double value) { return Quoted(Exact(value)); });
  return text.c_str();
}
