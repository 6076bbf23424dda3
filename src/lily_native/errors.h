#pragma once
#import <Foundation/Foundation.h>

#include <functional>
#include <stdexcept>
#include <string>

namespace lily {

// What the device could not do; module.mm turns it into lily.DeviceError.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A Python signal handler raised while native code waited; the Python error is set already.
struct Interrupted : std::exception {};

// Asked about every 50 ms of waiting; true = stop waiting, an Interrupted follows.
using InterruptCheck = std::function<bool()>;

// Message of an NSError and of the error below it, which often holds the cause.
std::string describe(NSError* error);

}  // namespace lily
